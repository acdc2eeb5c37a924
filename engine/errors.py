"""Errors that a user can cause."""


class ModelError(ValueError):
    """The model, its tokenizer or the device cannot be used as asked; the message is one line and says what to do."""
