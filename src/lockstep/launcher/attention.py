"""Whether anybody reads it when ranks do not go on. Pure."""

from collections.abc import Mapping


def choose(
    wanted: bool | None, stall: float, terminal: bool, environ: Mapping[str, str], *, debugged: bool
) -> tuple[float, str]:
    """After how many seconds without a step the ranks are asked where they are, 0 for never; and the rule.

    Example:
        >>> choose(None, 120.0, False, {"CI": "true"}, debugged=False)
        (120.0, 'CI in the environment')
    """
    rules = (
        (debugged, False, "--debug: a debugger stops ranks"),
        (wanted is not None, bool(wanted), "--watch" if wanted else "--no-watch"),
        (terminal, True, "a terminal is attached"),
        (bool(environ.get("CI")), True, "CI in the environment"),
        (True, False, "no terminal and no CI: nobody reads it"),
    )
    on, rule = next((on, rule) for applies, on, rule in rules if applies)
    return (stall if on else 0.0), rule
