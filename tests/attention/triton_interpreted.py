"""Run by test_contract.py with TRITON_INTERPRET=1; not collected by itself."""

from tests.attention.contract import Alibi2dContract


class TestTritonInterpreted(Alibi2dContract):
    impl = "triton"
