"""The doctests of a plugin whose host is not installed are left out, as its tests are; hypothesis draws the same cases
each time, unless ``--hypothesis-profile=default`` asks for new ones."""

from importlib.util import find_spec

from hypothesis import settings

collect_ignore = [f"rambo_plugins/{host}" for host in ("mmdet", "detectron2") if find_spec(host) is None]

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
