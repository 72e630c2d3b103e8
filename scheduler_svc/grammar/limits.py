"""How much a grammar may cost, to compile and at every token.

A grammar is compiled twice with the same limits: first in a process that may be killed (trial.py),
then in the scheduler. llguidance counts its work in units ("fuel"), which bound it roughly: of what
slipped through, the trial's processor time and memory are bounded by the operating system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SOURCE_BYTES: Final = 1 << 17  # of a schema, regex, grammar, or of all options of a choice
TRIAL_CPU_SECONDS: Final = 0.4
TRIAL_BYTES: Final = 256 << 20  # beyond what the vocabulary takes
TRIAL_STACK_BYTES: Final = 1 << 20  # threads of the scheduler have at least twice that
TRIAL_TOKENS: Final = 24  # how far the trial follows a grammar

# Measured on 49k tokens: masks of hostile grammars take up to 50 ms, those of ordinary ones 0.1 ms.
INITIAL_LEXER_FUEL: Final = 500_000
STEP_LEXER_FUEL: Final = 200_000
STEP_MAX_ITEMS: Final = 50_000
MAX_ITEMS_IN_ROW: Final = 800  # four for each optional property; at 2000 ambiguity takes 0.2 s
MAX_LEXER_STATES: Final = 50_000  # of about 1 kB


def parser_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_items_in_row=MAX_ITEMS_IN_ROW,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,  # else they hold the parser's state, some kB
    )
