"""The one error that users meet: a sentence that says what is wrong and what to do about it."""


class MergettaError(ValueError):
    """Input that cannot be used; the message is one sentence for a person. The command line exits with 2."""
