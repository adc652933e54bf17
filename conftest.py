"""The doctests of a plugin whose host is not installed are left out, as its tests are."""

from importlib.util import find_spec

collect_ignore = [f"rambo_plugins/{host}" for host in ("mmdet", "detectron2") if find_spec(host) is None]
