"""The errors of the client. Each message says what is wrong and what to do."""


class ClientError(Exception):
    """What goes wrong here or at the service, as one line for a person."""


class CommandError(ClientError):
    """The command cannot do what it was told; the message says why and what to do."""
