"""Fixtures that every ring may use."""

from hypothesis import settings

pytest_plugins = ["tests.support.netns", "tests.support.etcd", "tests.support.kube"]

# Machines that run the tests are slow and busy; a deadline would fail for the weather.
settings.register_profile("project", deadline=None, max_examples=60)
settings.load_profile("project")
