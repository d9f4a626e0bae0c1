import pytest

pytest.register_assert_rewrite("tests.integration.fleet", "tests.integration.operator_process")
