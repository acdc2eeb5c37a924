"""`batchrun doctor`: what there is, what is missing, and what follows from it."""

import json

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON list of facts on standard output.")
def doctor_command(*, as_json: bool) -> int:
    """Show the device, the kernels, the versions and what is missing.

    Exit code 2 when nothing can run before something is put right.
    """
    from batchrun.doctor import diagnose, report_lines

    facts = diagnose()
    click.echo(json.dumps([fact._asdict() for fact in facts]) if as_json else "\n".join(report_lines(facts)))
    return 2 if any(fact.broken for fact in facts) else 0
