"""`mgpu doctor`: the devices and backends of this machine, how mgpu_core will use them, and problems.

`examine` asks, `Report` holds, `render` and `Report.to_json` show. It is a report, never a test: it ends with status 0.
"""

import argparse

from mgpu_core.support.tables import show
from mgpu_core.tools.doctor.examination import examine
from mgpu_core.tools.doctor.report import Report, for_issue, lines_of, render

__all__ = ["Report", "examine", "render"]


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    report = examine(test_peers=args.p2p)
    if args.json or args.report:
        print(report.to_json() if args.json else for_issue(report), end="\n" if args.json else "")
    else:
        show(lines_of(report))
    return 0
