"""Errors that end a command, each with its exit code."""


class BatchrunError(Exception):
    """One clear line for the user: what, where, and what to do instead."""

    exit_code = 2


class Refused(BatchrunError):
    """Refused before the job started: usage, input or model. Nothing was created."""

    exit_code = 2


class Stopped(BatchrunError):
    """Stopped before the end; what is finished is on disk and can be resumed."""

    exit_code = 3
