"""What codecs do to the accuracy of three models: a perceptron, a ResNet and an LSTM."""
