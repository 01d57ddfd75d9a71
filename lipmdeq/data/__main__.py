"""``python -m lipmdeq.data``: fetch the larger data sets (``make data``)."""

from lipmdeq.data.fetch import main
from lipmdeq.shell import guarded

raise SystemExit(guarded("lipmdeq.data", main))
