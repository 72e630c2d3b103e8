"""later"""
from collections.abc import Sequence

from client.bench.result import Result


def result_page(result: Result) -> str:
    return ""


def comparison_page(results: Sequence[Result]) -> str:
    return ""
