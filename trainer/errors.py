"""The one kind of error that speaks to the user.

A `UserError` says what was found, what was expected and what to do, in terms of the settings; `__main__`
prints it as one line without a traceback. Everything else that is raised is a fault of ours. """


class UserError(ValueError):
    """Something the user can mend: a setting, a file, a full disk, a server that went away."""


class GateFailed(UserError):
    """A parity gate did not hold; the message names the likely cause."""
