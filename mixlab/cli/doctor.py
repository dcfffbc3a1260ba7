"""`mixlab doctor`."""

import json

from jsonargparse import ArgumentParser, Namespace

SICK = 1  # the exit code when something makes the program slow or wrong


def doctor_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Look at this machine and this installation: processor, versions, kernels, threads, GPU, compiler; "
        "what is missing, what makes the program slow or wrong, and what to do about it. The exit code is 1 if "
        "something makes it slow or wrong, else 0. Example: mixlab doctor --json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def doctor(arguments: Namespace) -> int:
    """Check machine, versions, kernels and threads, and say what to do."""
    from mixlab.deploy.doctor import examine

    checkup = examine()
    if arguments.json:
        print(json.dumps(checkup.plain(), indent=1))
        return 0 if checkup.is_healthy else SICK
    for title, facts in checkup.sections.items():
        print(title)
        for name, value in facts.items():
            print(f"  {name:<18}{value}")
    print("verdict")
    if checkup.is_healthy:
        print("  Nothing makes the program slow or wrong.")
    for problem in checkup.problems:
        print(f"  {problem.severity}: {problem.what}\n    {problem.advice}")
    return 0 if checkup.is_healthy else SICK
