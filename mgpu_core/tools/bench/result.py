"""The JSON file of a run: every sample, and all that a table or a picture needs.

A file can be drawn again without the case that made it, so old results stay readable when a case changes.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mgpu_core.support.files import write_whole
from mgpu_core.tools.bench.case import Case, Row, Ruling, UsageError

FORMAT = "mgpu_core benchmark 1"


@dataclass(frozen=True)
class Result:
    """One run of one case; fields as in `Case`."""

    case: str
    summary: str
    unit: str
    formula: str
    environment: dict[str, str]
    rows: list[Row]
    verdicts: list[Ruling]

    @classmethod
    def of(cls, case: Case, environment: dict[str, str], rows: list[Row], *, checked: bool) -> "Result":
        """Return the result of a run that is done, judged by the bounds of its case; unmeasured ones if ``checked``."""
        judged = [bound.judge(rows) for bound in case.bounds]
        verdicts = [verdict for verdict in judged if checked or verdict.value is not None]
        return cls(case.name, case.summary, case.unit, case.formula, environment, rows, verdicts)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1, allow_nan=False) + "\n"
        write_whole(path, lambda stream: stream.write(text.encode()))

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read the file. `OSError` if it cannot be opened, `UsageError` if it is damaged or not one of ours."""
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT or not content["rows"]:
                raise ValueError("another format, or no rows")
            content["rows"] = [Row(**row) for row in content["rows"]]
            content["verdicts"] = [Ruling(**verdict) for verdict in content["verdicts"]]
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: wanted a file of the format {FORMAT!r} ({error})") from error
