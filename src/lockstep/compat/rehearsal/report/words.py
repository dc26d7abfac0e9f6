"""A report in words. Pure."""

from collections.abc import Iterator, Sequence

from lockstep.compat.rehearsal.report.page import Report

_MOST = 10
"""So many rows of a kind are shown."""


def lines(report: Report) -> list[str]:
    """Write a report; what was looked for and not found takes one line at the end."""
    if not report.ranks:
        return ["rehearsal: no rank took an optimizer step"]
    least, most = report.steps
    steps = f"{most} optimizer step{'s' * (most != 1)}" if least == most else f"{least} to {most} optimizer steps"
    out = [f"rehearsal: {report.ranks} rank{'s' * (report.ranks != 1)}, {steps} on each"]
    out += [f"  peak memory     {_memory(report.peaks)}"]
    first, *rows = _collectives(report)
    out += [f"  collectives     {first}", *(f"    {row}" for row in rows)]
    findings = dict(_findings(report))
    for title, rows in findings.items():
        if rows:
            out.append(f"  {title}:")
            out += [f"    {row}" for row in rows[:_MOST]]
            out += [f"    ... and {len(rows) - _MOST} more"] * (len(rows) > _MOST)
    fine = [title for title, rows in findings.items() if not rows]
    if fine:
        out.append(f"  none: {', '.join(fine)}")
    return out


def _findings(report: Report) -> Iterator[tuple[str, list[str]]]:
    everywhere = tuple(range(report.ranks))
    yield (
        "parameters without gradients",
        [name if ranks == everywhere else f"{name} ({_ranks(ranks)})" for name, ranks in report.without_gradient],
    )
    yield "batch norm over one rank's samples only", list(report.unsynchronised)
    yield "samplers that shuffle every epoch alike (sampler.set_epoch(epoch))", list(report.same_epoch)
    yield (
        "checkpoints written by several ranks",
        [f"{path} ({_ranks(ranks)})" for path, ranks in report.saved_by_several],
    )
    yield (
        "tensors on the wrong device",
        [f"{place}: {what}" + (f", {count} times" if count > 1 else "") for place, what, count in report.misplaced],
    )


def _memory(peaks: Sequence[tuple[int, int]]) -> str:
    if len({size for _, size in peaks}) == 1:
        return f"{show_bytes(peaks[0][1])} on each rank"
    return ", ".join(f"{show_bytes(size)} (rank {rank})" for rank, size in peaks[:_MOST])


def _collectives(report: Report) -> list[str]:
    if not report.counted:
        return ['not counted: gloo\'s cannot be; start the group with "nccl"']
    if not report.collectives:
        return ["none in the last step"]
    return [
        "in the last step, by each rank:",
        *(f"{count} {kind}" + (f" of {show_bytes(size)}" if size else "") for kind, size, count in report.collectives),
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def show_bytes(size: int) -> str:
    """Write a number of bytes.

    Example:
        >>> show_bytes(512), show_bytes(5_000), show_bytes(3 * 2**20)
        ('512 B', '4.9 KiB', '3.0 MiB')
    """
    if size < 1024:
        return f"{size} B"
    power = 3 if size >= 2**30 else 2 if size >= 2**20 else 1
    return f"{size / 1024**power:.1f} {' KMG'[power]}iB"
