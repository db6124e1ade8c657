"""Studies of the contest: a simulated evaluation, new samples of its data, and the Bayes-optimal accuracy on them."""
