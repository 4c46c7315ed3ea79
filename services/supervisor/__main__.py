"""`python -m services.supervisor`, which is `paceline serve`."""

import signal


def run() -> int:
    # Until the stack handles it, Ctrl-C ends the process without a traceback out of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from services.supervisor.stack import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
