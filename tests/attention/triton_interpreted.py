"""Run by test_contract.py with TRITON_INTERPRET=1; not collected by itself."""

from thinsection.testing.attention_contract import Alibi2dContract


class TestTritonInterpreted(Alibi2dContract):
    impl = "triton"
