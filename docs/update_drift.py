"""Write the table of docs/drift.md again: ``make docs``."""

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("drift.md")
BEGIN, END = "<!-- drift table begins -->\n", "<!-- drift table ends -->\n"
COMMAND = [sys.executable, "-m", "provisioner", "drift", "--against", "pypi:>=0.24", "--format", "markdown"]


def main() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    # The last line says what the run cost, which is of that run and not of the table.
    table = "\n".join(done.stdout.rstrip("\n").splitlines()[:-1]).rstrip()
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n\n{END}{tail}", encoding="utf-8")


main()
