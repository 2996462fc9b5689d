"""The tests. Folders mirror ``src/batchline``; ``conformance`` has the suites for every backend."""

import pytest

pytest.register_assert_rewrite("tests.support")
