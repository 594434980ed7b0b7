"""treemla as an attention backend of SGLang: `--attention-backend treemla`, and `treemla-shadow` to try it.

SGLang calls `register` in every one of its processes, through the entry point group `sglang.srt.plugins`. It imports
nothing heavy; the backend is imported when a model runner asks for it.
"""

import logging
import os
from typing import Any

BACKEND = "treemla"
SHADOW = "treemla-shadow"
SWITCH = "TREEMLA_SLOTS"  # an environment variable: see treemla.sglang.slots
REMEDY = "run `python -m treemla doctor`; SGLang will refuse --attention-backend treemla until this is fixed"

logger = logging.getLogger(__name__)


def register() -> None:
    """Make our names known to SGLang's command line and registry, and hook in what TREEMLA_SLOTS asks for. Calling it
    again changes nothing.

    SGLang logs and swallows what a plug-in raises, so a failure is also one ERROR line here, with the remedy.
    """
    try:
        from treemla.sglang import compat

        compat.register_backend(BACKEND, make_backend)
        compat.register_backend(SHADOW, make_shadow)
        if os.environ.get(SWITCH):
            from treemla.sglang import slots

            slots.install()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        logger.error("treemla: not registered with SGLang: %s. %s", what, REMEDY)  # noqa: TRY400 # SGLang adds the trace
        raise


def make_backend(runner: Any) -> Any:
    """The attention backend of a model runner. A draft model's attention is Triton's: treemla serves the target."""
    return _make(runner, shadow=False)


def make_shadow(runner: Any) -> Any:
    """As `make_backend`, comparing with Triton in some of the steps."""
    return _make(runner, shadow=True)


def _make(runner: Any, *, shadow: bool) -> Any:
    from treemla.sglang import compat

    if runner.is_draft_worker:
        logger.info("treemla: the draft model's attention stays Triton's")
        return compat.triton_backend()(runner)
    if os.environ.get(SWITCH):
        from treemla.sglang import slots

        slots.expect_ordered(runner.token_to_kv_pool_allocator)
    return (compat.shadow_class() if shadow else compat.backend_class())(runner)
