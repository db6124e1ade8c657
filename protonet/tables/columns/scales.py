"""Recognize answers that have an order: degrees such as "disagree" and "agree", months, sizes, and codes ("2 - fair").

A *scale* gives each answer a number, so that an answer which no training row has is still in its place. The words are
in the languages of `protonet.tables.suspicious`: English, German, French, Spanish, Portuguese, Italian, Dutch, Polish,
Russian, Chinese, Japanese and Korean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from protonet.tables.columns.units import normalize_cell

# Beginnings of words. The words of a degree, from the lowest to the highest; the middle one is 0.
_DEGREES = {
    -3: "none|absent|kein\\b|keine\\b|aucune?\\b|ningun|nenhum|nessun|geen\\b|brak|нет\\b|отсутств|无|なし|없음",
    -2: "never|nie\\b|niemals|jamais|nunca|mai\\b|nooit|nigdy|никогда|从不|从来不|決して|まったくない|terribl|awful|"
    "ungenügend|insuffi|very poor|mínim|minim|trivial|negligib",
    -1: "disagree|dissatis|unsatis|bad|poor|unlikely|unimportant|unhappy|negativ|useless|difficult|low|lo\\b|small|"
    "mild|weak|slow|short|few|light|cold|cool|rare|seldom|hardly|worse|young|minor|thin|below|decreas|inferior|"
    "unzufrieden|schlecht|unwahrsch|unwichtig|ablehn|lehne|mangelhaft|niedrig|gering|klein|leicht|schwach|langsam|"
    "kurz|kalt|kühl|selten|wenig|jung|schlechter|désaccord|insatisf|mauvais|mal\\b|improbab|faible|bas\\b|basse|"
    "petit|lég[eè]r|lent|froid|rare|peu\\b|pire|desacuerdo|mala?s?\\b|malo|baj[oa]|pequeñ|leve|débil|lent[oa]|frí[oa]|"
    "raramente|rara vez|poc[oa]|peor|discord|desacordo|insatisfeit|ruim|mau\\b|má\\b|improváv|baix[oa]|pequen|"
    "frac[oa]|fri[oa]|pior|disaccordo|insoddisf|cattiv|scars|improbabil|bass[oa]|piccol|liev|debol|fredd|peggior|"
    "oneens|ontevreden|slecht|onwaarsch|onbelang|laag|lage|klein|licht|zwak|langzaam|koud|zelden|weinig|niezadow|"
    "zły|źle|zła|złe|słab|nieprawd|nieważn|nisk|mał|łagod|zimn|rzadk|gorz|недовол|неудовл|плох|маловер|неважн|низк|"
    "мал|легк|слаб|медленн|холод|редк|хуже|不同意|反对|不满|差|坏|不可能|不重要|很少|低|小|轻|弱|慢|冷|少|思わない|"
    "不満|悪|あてはまらない|めったに|まれに|軽|寒|遅|불만|나쁘|나쁨|동의하지|그렇지 않|드물게|낮|작|경증|약함|느",
    -0.5: "ausreichend|passable|suficiente|sufficient|hinreichend",
    0: "neither|neutr|undecided|unsure|uncertain|indifferent|average|medium|med\\b|mid|moderat|normal|fair|okay|"
    "ok\\b|so.so|sometimes|occasion|same|warm|weder|teils|unentsch|mittel|mässig|befriedigend|manchmal|gelegentl|"
    "gleich|lau|neutre|ni\\b|moyen|modér|parfois|quelquefois|pareil|indecis|medi[oa]|regular|a veces|algunas veces|"
    "igual|nem\\b|médi[oa]|às vezes|as vezes|razoáv|né\\b|indeciso|a volte|qualche volta|talvolta|uguale|noch\\b|"
    "gemiddeld|matig|soms|neutraal|ani\\b|średni|umiarkow|czasam|czasem|trudno|przecięt|ни\\b|нейтр|затрудн|средн|"
    "умерен|иногда|一般|中立|中|普通|有时|偶尔|不确定|どちらとも|時々|ときどき|보통|중립|중간|가끔",
    1: "agree|satisf|good|likely|probabl|important|happy|positiv|useful|easy|high|hi\\b|large|big|severe|strong|"
    "fast|long|many|much|heavy|hot|often|frequent|usual|better|old\\b|major|thick|above|increas|superior|hard\\b|"
    "zustimm|stimm|trifft|zufrieden|gut|wahrsch|wichtig|hoch|gross|schwer|stark|schnell|lang|heiss|oft\\b|"
    "häufig|viel|alt\\b|besser|d'accord|bon\\b|bonne|bien|haut|élevé|grand|grave|sévère|fort|rapid|chaud|souvent|"
    "beaucoup|mieux|acuerdo|buen|alt[oa]|grande|sever|fuerte|rápid|calient|a menudo|frecuent|mucho|mejor|concord|"
    "acordo|bom\\b|boa\\b|bem\\b|prováv|forte|quente|muito frequ|melhor|accordo|soddisf|buon|ben\\b|bene|veloc|cald|"
    "spesso|miglior|eens|tevreden|goed|waarsch|belang|hoog|hoge|groot|grote|ernstig|sterk|snel|heet|vaak|beter|"
    "zgadzam|zadow|dobr|prawdop|ważn|wysok|duż|ciężk|siln|szybk|gorąc|często|lepi|lepsz|соглас|довол|удовл|хорош|"
    "вероятн|важн|высок|больш|тяжел|тяжёл|сильн|быстр|горяч|часто|лучше|同意|满意|好|可能|重要|高|大|重|强|快|热|多|"
    "经常|常常|思う|満足|良|よい|よく|あてはまる|暑|速|しばしば|만족|좋|중요|동의|그렇다|자주|높|크|큼|중증|강함|빠",
    2: "always|excellent|outstanding|perfect|critical|extrem|immer|hervorragend|ausgezeichnet|kritisch|toujours|"
    "critique|siempre|crític|sempre|ottim|eccellent|critic|altijd|uitstekend|zawsze|celując|doskonał|krytyczn|"
    "всегда|отличн|критич|总是|优|いつも|常に|항상|우수",
}
_STRONG = (
    "very|strong|extreme|complete|total|full|absolut|definite|much|sehr|voll|völlig|ganz|stark|äusserst|très|tout|"
    "fort|extrême|entière|muy|pleno|plena|muito|molto|fortement|del tutto|zeer|heel|helemaal|volled|sterk|zdecyd|"
    "całk|bardzo|w pełni|полност|соверш|очень|абсол|категор|非常|很|完全|十分|强烈|とても|強く|全く|大変|매우|아주"
)
_WEAK = (
    "somewhat|slight|rather|a little|mostly|partly|partial|fairly|almost|quite|eher|etwas|teilweise|ziemlich|"
    "fast\\b|plutôt|assez|un peu|partiel|presque|algo|bastante|un poco|parcial|casi|um pouco|quase|abbastanza|"
    "piuttosto|parzial|quasi|enigsz|beetje|redelijk|tamelijk|bijna|raczej|trochę|częśc|prawie|скорее|частичн|"
    "отчасти|почти|比较|有点|稍|有些|やや|少し|どちらかと|약간|조금|다소|거의"
)
_SCARCE = "little|hardly|wenig|peu|poc[oa]|pouc[oa]|weinig|mało|мало"  # with a positive word
_NOT_AT_ALL = (
    "at all|überhaupt nicht|gar nicht|du tout|\\bnada\\b|per niente|affatto|helemaal niet|wcale|совсем не|"
    "完全不|全く.*ない|전혀"
)
_NOT = re.compile(r"(?:\bnot|\bno|\bnicht|\bpas|\bniet|\bnie|\bне|\bnon|\bnão|n't)\b|不|ません|ない$|지 않")
_MODERATE = re.compile("moderat|mässig|modér|umiarkow|умерен")
# Words for the places of other scales: beginnings of words in the order of the scale, separated by semicolons.
_SEQUENCES = {
    "month": "jan|ene|gen|sty|янв;feb|fév|fev|lut|фев;mar|mär|mrz|maa|мар;apr|avr|abr|kwi|апр;may|mai|mei|mag|maj|"
    "май|мая;jun|juin|giu|cze|июн;jul|juil|lug|lip|июл;aug|aoû|ago|sie|авг;sep|set|wrz|сен;oct|okt|out|ott|paź|paz|"
    "окт;nov|lis|ноя;dec|dez|déc|dic|gru|дек",
    "weekday": "mon|mo\\b|lun|lu\\b|seg|maa|pon|pn\\b|пн|пон|周一|星期一|月|월;tue|tu\\b|die|di\\b|mar|ter|din|wto|"
    "wt\\b|вт|周二|星期二|火|화;wed|we\\b|mit|mi\\b|mer|mié|mie|qua|woe|wo\\b|śro|sro|śr\\b|ср|周三|星期三|水|수;"
    "thu|th\\b|don|do\\b|jeu|jue|gio|qui|czw|чт|чет|周四|星期四|木|목;fri|fr\\b|fre|ven|vie|sex|vri|vr\\b|pią|pia|"
    "pt\\b|пт|пят|周五|星期五|金|금;sat(?:u|\\b)|sa\\b|sam|sáb|sab|zat|za\\b|sob|сб|суб|周六|星期六|土|토;sun|su\\b|"
    "so\\b|son|dim|dom|zon|zo\\b|nie|nd\\b|вс|вос|周日|星期日|星期天|日|일",
    "size": "xxs|2xs;xs|extra.?small;s\\b|small;m\\b|medium;l\\b|large;xl|extra.?large|x.?large;xxl|2xl;xxxl|3xl;4xl",
    "education": "none|no school;primary|elementary|grundsch|primair|primari;secondary|high school|hauptsch|second|"
    "lycée;diploma|abitur|bacc|some college|associate;bachelor|licen|undergrad|college;master|magist|graduate;phd|"
    "doct|dr",
    "period": "hour|stünd;dai|täg|quot|diari|diár|dag|codz|ежедн|每天|毎日|매일;week|wöch|hebd|seman|settim|tyg|"
    "еженед|每周|毎週|매주;month|monat|mens|maand|mies|ежемес|每月|毎月|매월;quarter|quartal|trim|kwart;year|annual|"
    "jähr|annuel|anual|annu|jaar|roczn|ежегод|每年|毎年|매년;never|nie|jamais|nunca|mai|nooit|nigdy|никогда|从不",
    "place": "first|erst|prem|prim|eerst|pierw|перв|第一;second|zweit|deux|segund|secon|tweed|drug|втор|第二;third|"
    "dritt|trois|terc|terz|derd|trzec|трет|第三;fourth|viert|quatr|cuart|quart|vierd|czwart|четв|第四;fifth|fünft|"
    "cinq|quint|vijf|piąt|пят|第五",
    "experience": "novice|none;beginner|anfäng|début|princip|inici|basic;junior;intermed|fortgeschr|interm;advanced|"
    "avanc|avanz|erfahren|senior;expert|exp|profi|master",
}
_PLACES = {
    name: [re.compile(rf"(?:{place})", re.IGNORECASE) for place in text.split(";")] for name, text in _SEQUENCES.items()
}


def _compile_words(words: str) -> re.Pattern[str]:
    """Compile beginnings of words, separated by bars, as a pattern; Chinese, Japanese and Korean ones need no space."""
    is_spaced = {word: max(word) < "\u2e80" for word in words.split("|")}
    spaced, others = ("|".join(word for word in is_spaced if is_spaced[word] == kind) for kind in (True, False))
    return re.compile("|".join([rf"\b(?:{spaced})"] * bool(spaced) + [others] * bool(others)))


_DEGREE_WORDS = {value: _compile_words(words) for value, words in _DEGREES.items()}
_STRONG_WORDS, _WEAK_WORDS, _SCARCE_WORDS = map(_compile_words, (_STRONG, _WEAK, _SCARCE))
_ORDINAL_UNITS = (
    "q|quarter|quartal|trimestre|kwartaal|kwartał|квартал|w|week|kw|semana|semaine|settimana|tydzień|level|stufe|"
    "niveau|nivel|nível|livello|poziom|уровень|stage|stadium|stade|etapa|grade|grad|grado|grau|stopień|step|phase|"
    "tier|year|rank|score|категория|第"
)
_CODE = re.compile(
    rf"\W?(\d{{1,3}}|[a-z])(?:\s?[-–—:.)\]=_/]+\s*|\s)(?=\D)|(?:{_ORDINAL_UNITS})[\s._-]*(\d{{1,2}}|[ivx]+)\b.*"
)
_PLACE_NUMBER = re.compile(r"(\d{1,2})(?:st|nd|rd|th|er|e|ème|\.|º|ª|月|월|季度|분기|周|学期)(?:\s[^\W\d]+)?")
_GRADE = re.compile(r"([a-f])\1{0,2}([+-]?)")


def _score_degree(text: str) -> float:
    """Score words of agreement, quality, frequency or amount; 0 is the middle. NaN for other text."""
    if re.search(_NOT_AT_ALL, text):
        return -2.5
    found = [(match, value) for value, words in _DEGREE_WORDS.items() for match in words.finditer(text)]
    modifiers = [match for words in (_STRONG_WORDS, _WEAK_WORDS) for match in words.finditer(text)]
    bases = [
        (match, value)
        for match, value in found
        if all(match.start() >= other.end() or match.end() <= other.start() for other in modifiers)
    ]
    if bases:
        found = bases
    else:  # "strong" by itself
        modifiers = []
    strong, weak = (next((m for m in modifiers if m.re is words), None) for words in (_STRONG_WORDS, _WEAK_WORDS))
    values = [value for _, value in found]
    others = [value for value in values if value]
    if 0 in values and not (others and _MODERATE.search(text)):  # neither agree nor disagree
        return 0.0
    if not others:
        return math.nan
    negation = _NOT.search(text)
    is_positive = max(others) > 0
    if negation and is_positive:  # "definitely not likely" and "not very likely"
        return -0.5 if strong and strong.start() > negation.start() else -1.75 if strong else -1.0 + 0.25 * bool(weak)
    if is_positive and not weak and _SCARCE_WORDS.search(text):
        return -0.75
    value: float = next((value for value in (-3, -2, 2) if value in values), 0)
    if not value:
        value = max((len(match[0]), value) for match, value in found if value)[1]
    is_extreme = strong is not None and strong[0][:5] in {"extre", "extrê", "äusse"}
    size = abs(value) + (0.75 + 0.5 * is_extreme) * (strong is not None and abs(value) == 1) - 0.5 * bool(weak)
    return math.copysign(0.75 if 0 in values else size, value)


def _score_code(text: str) -> float:
    """Score the number or letter before an answer, as in "2 - fair" and "a) never", or behind a word ("Stage II")."""
    if match := _PLACE_NUMBER.fullmatch(text):
        return float(match[1])
    match = _CODE.match(text)
    code = match and (match[1] or match[2])
    if not code:
        return math.nan
    if code.isdecimal():
        return float(code)
    roman = {"i": 1, "v": 5, "x": 10}
    if match and match[2]:
        sizes = [roman[letter] for letter in code]
        return float(sum(-size if size < max(sizes[index:]) else size for index, size in enumerate(sizes)))
    return float(ord(code))


def _score_grade(text: str) -> float:
    """Score grades such as A+, B- and BBB, from the best to the worst."""
    match = _GRADE.fullmatch(text)
    letters = len(text.rstrip("+-"))
    return 9.0 * (ord(match[1]) - 96) - 3 * letters - {"+": 1, "-": -1, "": 0}[match[2]] if match else math.nan


def _score_signs(text: str) -> float:
    """Score repeated signs, such as + and +++; a minus counts down."""
    text = text.replace(" ", "").replace("☆", "")
    if text in {"0", "±", "+/-", "o"}:
        return 0.0
    if text in {"(+)", "(-)"}:
        return 0.5 if "+" in text else -0.5
    is_repeated = len(set(text)) == 1 and text[0] in "+*★⭐$€£¥✓•-−"
    return math.nan if not is_repeated else float(-len(text) if text[0] in "-−" else len(text))


def _score_place(places: Sequence[re.Pattern[str]], text: str) -> float:
    """Score the place of a word in a sequence, such as that of a month in the year."""
    return next((float(place) for place, words in enumerate(places) if words.match(text)), math.nan)


_SCORES: dict[str, Callable[[str], float]] = {
    **{"signs": _score_signs, "grade": _score_grade, "code": _score_code},
    **{name: lambda text, places=places: _score_place(places, text) for name, places in _PLACES.items()},  # type: ignore[misc]
    "degree": _score_degree,
}
#: The names of the scales.
SCALES = tuple(_SCORES)


@lru_cache(maxsize=4096)
def score_answer(scale: str, answer: str) -> float:
    """Return the number of an answer on one of ``SCALES``; NaN if it has none."""
    text = " ".join(normalize_cell(answer).casefold().replace("_", " _ ").split()).replace(" _ ", "_").replace("’", "'")
    return _SCORES[scale](text)


def find_scale(answers: Sequence[str]) -> str:
    """Find the scale on which all answers but one, such as "don't know", have at least three numbers; "" for none."""
    min_answers, max_answers, max_others = 3, 60, 1
    for scale in SCALES if min_answers <= len(answers) <= max_answers else ():
        scores = [score_answer(scale, answer) for answer in answers]
        others, distinct = sum(map(math.isnan, scores)), {score for score in scores if not math.isnan(score)}
        is_nominal = scale == "grade" and not any(answer[-1:] in "+-" or len(answer) > 1 for answer in answers)
        if scale == "code" and not others:  # neither house numbers nor initials
            is_nominal = answers[0][:1].isdigit() and max(distinct) - min(distinct) > 3 * len(distinct)
            is_nominal |= min(distinct) > 90 and max(distinct) - min(distinct) > len(distinct)
        if others <= max_others and len(distinct) >= max(min_answers, len(answers) - others - 1) and not is_nominal:
            return scale
    return ""
