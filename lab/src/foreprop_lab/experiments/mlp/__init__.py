"""A perceptron on one to seven workers: the comparison paper's experiment."""
