"""Scales: answers in twelve languages are in order, and names of categories without an order are on no scale."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protonet.tables.columns.category import Category
from protonet.tables.columns.encoding import infer_column_type
from protonet.tables.columns.scales import SCALES, find_scale, score_answer

# Answers in order, separated by bars.
ORDERED = [
    "Strongly disagree|Disagree|Neither|Agree|Strongly agree",
    "Strongly disagree|Disagree|Somewhat disagree|Neither agree nor disagree|Somewhat agree|Agree|Strongly agree",
    "Stimme überhaupt nicht zu|Stimme nicht zu|Teils/teils|Stimme zu|Stimme voll zu",
    "trifft gar nicht zu|trifft eher nicht zu|teils teils|trifft eher zu|trifft voll zu",
    "ungenügend|mangelhaft|ausreichend|befriedigend|gut|sehr gut",
    "Pas du tout d'accord|Pas d'accord|Neutre|D'accord|Tout à fait d'accord",
    "Très insatisfait|Insatisfait|Neutre|Satisfait|Très satisfait",
    "Totalmente en desacuerdo|En desacuerdo|Neutral|De acuerdo|Totalmente de acuerdo",
    "Discordo totalmente|Discordo|Neutro|Concordo|Concordo totalmente",
    "Per niente d'accordo|Poco d'accordo|Neutrale|D'accordo|Molto d'accordo",
    "Helemaal oneens|Oneens|Neutraal|Eens|Helemaal eens",
    "Zdecydowanie się nie zgadzam|Nie zgadzam się|Ani tak ani nie|Zgadzam się|Zdecydowanie się zgadzam",
    "Полностью не согласен|Не согласен|Затрудняюсь ответить|Согласен|Полностью согласен",
    "非常不同意|不同意|一般|同意|非常同意",
    "全くそう思わない|そう思わない|どちらともいえない|そう思う|とてもそう思う",
    "전혀 그렇지 않다|그렇지 않다|보통이다|그렇다|매우 그렇다",
    "sehr unzufrieden|eher unzufrieden|weder noch|eher zufrieden|sehr zufrieden",
    "Muy insatisfecho|Insatisfecho|Neutral|Satisfecho|Muy satisfecho",
    "molto insoddisfatto|insoddisfatto|neutrale|soddisfatto|molto soddisfatto",
    "muito insatisfeito|insatisfeito|neutro|satisfeito|muito satisfeito",
    "zeer ontevreden|ontevreden|neutraal|tevreden|zeer tevreden",
    "очень плохо|плохо|средне|хорошо|очень хорошо",
    "bardzo niezadowolony|niezadowolony|neutralny|zadowolony|bardzo zadowolony",
    "非常に不満|不満|普通|満足|非常に満足",
    "très mauvais|mauvais|moyen|bon|très bon",
    "plutôt pas d'accord|ni d'accord ni pas d'accord|plutôt d'accord|tout à fait d'accord",
    "muy malo|malo|regular|bueno|muy bueno",
    "not at all satisfied|not very satisfied|somewhat satisfied|very satisfied",
    "much worse|worse|same|better|much better",
    "sehr unwahrscheinlich|unwahrscheinlich|neutral|wahrscheinlich|sehr wahrscheinlich",
    "never|rarely|sometimes|often|always",
    "almost never|sometimes|fairly often|very often|always",
    "nie|selten|manchmal|oft|immer",
    "jamais|rarement|parfois|souvent|toujours",
    "nunca|rara vez|a veces|a menudo|siempre",
    "никогда|редко|иногда|часто|всегда",
    "从不|很少|有时|经常|总是",
    "mai|raramente|a volte|spesso|sempre",
    "nunca|raramente|às vezes|frequentemente|sempre",
    "nooit|zelden|soms|vaak|altijd",
    "nigdy|rzadko|czasami|często|zawsze",
    "全くない|めったにない|時々|よく|いつも",
    "전혀|드물게|가끔|자주|항상",
    "low|medium|high",
    "niedrig|mittel|hoch",
    "faible|moyen|élevé",
    "bajo|medio|alto",
    "basso|medio|alto",
    "niski|średni|wysoki",
    "低|中|高",
    "низкий|средний|высокий",
    "baixo|médio|alto",
    "laag|gemiddeld|hoog",
    "低い|普通|高い",
    "낮음|보통|높음",
    "very low|low|medium|high|very high",
    "none|mild|moderate|severe|critical",
    "keine|leicht|mäßig|schwer",
    "aucune|légère|modérée|sévère",
    "poor|fair|good|very good|excellent",
    "not at all important|slightly important|moderately important|very important|extremely important",
    "very dissatisfied|dissatisfied|neutral|satisfied|very satisfied",
    "very unlikely|unlikely|neutral|likely|very likely",
    "XS|S|M|L|XL",
    "small|medium|large",
    "klein|mittel|groß",
    "S|M|L|XL|2XL",
    "petit|moyen|grand",
    "маленький|средний|большой",
    "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec",
    "Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember",
    "janvier|février|mars|avril|mai|juin|juillet|août|septembre|octobre|novembre|décembre",
    "enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre",
    "styczeń|luty|marzec|kwiecień|maj|czerwiec|lipiec|sierpień|wrzesień|październik|listopad|grudzień",
    "1月|2月|3月|4月|12月",
    "gennaio|febbraio|marzo|aprile|maggio|giugno|luglio|agosto|settembre|ottobre|novembre|dicembre",
    "janeiro|fevereiro|março|abril|maio|junho|julho|agosto|setembro|outubro|novembro|dezembro",
    "januari|februari|maart|april|mei|juni|juli|augustus|september|oktober|november|december",
    "январь|февраль|март|апрель|май|июнь|июль|август|сентябрь|октябрь|ноябрь|декабрь",
    "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "Mo|Di|Mi|Do|Fr|Sa|So",
    "Montag|Dienstag|Mittwoch|Donnerstag|Freitag|Samstag|Sonntag",
    "lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche",
    "lunes|martes|miércoles|jueves|viernes|sábado|domingo",
    "segunda|terça|quarta|quinta|sexta|sábado|domingo",
    "lunedì|martedì|mercoledì|giovedì|venerdì|sabato|domenica",
    "maandag|dinsdag|woensdag|donderdag|vrijdag|zaterdag|zondag",
    "poniedziałek|wtorek|środa|czwartek|piątek|sobota|niedziela",
    "понедельник|вторник|среда|четверг|пятница|суббота|воскресенье",
    "星期一|星期二|星期三|星期四|星期五|星期六|星期日",
    "Mon|Tue|Wed|Thu|Fri|Sat|Sun",
    "月曜日|火曜日|水曜日|木曜日|金曜日|土曜日|日曜日",
    "월요일|화요일|수요일|목요일|금요일|토요일|일요일",
    "Q1|Q2|Q3|Q4",
    "KW 1|KW 2|KW 13|KW 24",
    "W01|W02|W10",
    "+|++|+++",
    "-|+|++|+++",
    "*|**|***",
    "1_Good|2_Fair|3_Poor",
    "1 - good|2 - fair|3 - bad",
    "a) never|b) rarely|c) often|d) always",
    "(1) low|(2) mid|(3) high",
    "1: yes always|2: mostly|3: no",
    "1 Gut|2 Mittel|3 Schlecht",
    "[0] none|[1] one|[2] two",
    "Stage I|Stage II|Stage III|Stage IV",
    "1st|2nd|3rd|4th",
    "A+|A|A-|B+|B|B-|C",
    "AAA|AA+|AA|BBB-|BB",
    "Level 1|Level 2|Level 3",
    "Stufe 1|Stufe 2|Stufe 4",
    "daily|weekly|monthly|yearly",
    "täglich|wöchentlich|monatlich|jährlich",
    "primary|secondary|bachelor|master|phd",
    "beginner|intermediate|advanced|expert",
    "1er trimestre|2e trimestre|3e trimestre|4e trimestre",
    "Small|Medium|Large|X-Large",
    "01_low|02_mid|03_high",
    "非常不满意|不满意|一般|满意|非常满意",
    "매우 불만|불만|보통|만족|매우 만족",
]
# Categories without an order.
NOMINAL = [
    "T1|T2|T3|T4",
    "red|green|blue",
    "Adelie|Gentoo|Chinstrap",
    "A|B|C|D",
    "apple|banana|cherry|melon",
    "Paris|Rome|Oslo|Bern|Kyiv",
    "S|C|Q",
    "teacher|doctor|nurse|farmer|clerk",
    "clay|sand|peat|rock",
    "chalk|ink|oil|water",
    "Anna|Peter|Maria|Jan|Tom",
    "A|B|AB|0",
    "round|oval|square",
    "sun|mon",
    "USA|France|Germany|Italy|Japan",
    "wood|steel|glass|stone",
    "soccer|tennis|golf|swimming",
    "sunny|rainy|cloudy|snow|fog",
    "x1|y2|z3",
    "single|married|divorced|widowed",
    "Private|Self-emp|Government|Without-pay",
    "Husband|Wife|Own-child|Unmarried|Other",
    "number 0|number 1|number 2",
    "dog|cat|mouse|sheep|cow",
    "oak|elm|ash|fir",
    "48 Elm St|12 Oak St|7 Main St",
    "north|south|east|west",
    "S - single|M - married|D - divorced",
    "Audi|BMW|VW|Ford",
    "metal|plastic|paper",
    "black|brown|blond|red",
    "sales|marketing|hr|it|finance",
    "public|private|none",
    "smooth|rough|hairy",
    "Month-to-month|One year|Two year",
    "Electronic check|Mailed check|Bank transfer|Credit card",
    "a b|c d|e f",
    "bell|conical|convex|flat|knobbed|sunken",
    "English|German|French|Spanish",
    "Africa|Asia|Europe|Americas",
    "rock|pop|jazz|folk|metal",
    "White|Black|Asian|Other",
    "Private|Local-gov|State-gov|Never-worked",
    "tea|coffee|juice|soda",
]


def objects(*cells: str) -> np.ndarray:
    return np.array(cells, object)


@pytest.mark.parametrize("text", ORDERED)
def test_answers_are_in_order(text: str) -> None:
    answers = text.split("|")
    scale = find_scale(answers)
    assert scale in SCALES
    scores = [score_answer(scale, answer) for answer in answers]
    assert scores in (sorted(set(scores)), sorted(set(scores), reverse=True))
    assert scale == find_scale(answers[::-1]) == find_scale([answer.upper() for answer in answers])


@pytest.mark.parametrize("text", NOMINAL)
def test_other_categories_have_no_order(text: str) -> None:
    assert find_scale(text.split("|")) == ""


def test_an_order_of_which_fit_saw_a_part_ranks_new_answers() -> None:
    cells = objects("Disagree", "Neither", "Agree", "don't know", "")
    column = infer_column_type(np.tile(cells, 6)).column
    assert isinstance(column, Category)
    new = objects("Strongly disagree", "Disagree", "Neither", "Somewhat agree", "Agree", "Strongly agree")
    ranks = column.encode(new)[:, 0]
    assert (np.diff(ranks) > 0).all()
    assert not column.encode(objects("don't know", "perhaps", ""))[:, 0].any()  # the mean
    assert column.is_invalid(objects("Strongly agree", "perhaps")).tolist() == [False, True]
    levels = column.encode(np.tile(cells, 6))
    np.testing.assert_allclose(levels.mean(axis=0), 0, atol=1e-6)


def test_few_answers_and_other_scales_have_no_score() -> None:
    assert find_scale(["low", "high"]) == ""
    assert find_scale([]) == ""
    assert all(math.isnan(score_answer(scale, "zebra")) for scale in SCALES)
    with pytest.raises(KeyError, match="colours"):
        score_answer("colours", "red")
