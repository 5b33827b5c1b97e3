"""The engines that the demo runs, by the name that `--engine` takes."""

from demo.engine import Engine
from demo.engines.sglang import SGLang
from demo.engines.vllm import VLLM

ENGINES: dict[str, type[Engine]] = {"vllm": VLLM, "sglang": SGLang}
