"""transformers' `generate` behind a chat endpoint, one answer at a time, greedy, streamed.

Runs in the peer's own environment, so it imports nothing of this repository.
`python transformers_server.py --model DIRECTORY --port N --threads N`
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import transformers


class Generator:
    """generate is not made for several calls at once: they take turns."""

    def __init__(self, path: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.turn = threading.Lock()

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, str]], max_tokens: int, streamer: Frames) -> None:
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with self.turn:
            self.model.generate(
                **prompt, max_new_tokens=max_tokens, do_sample=False, use_cache=True, streamer=streamer
            )


class Frames(transformers.generation.streamers.BaseStreamer):
    """Writes a frame for every token. generate puts the prompt first."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, handler: Handler) -> None:
        self._tokenizer = tokenizer
        self._handler = handler
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_tokens:
            self.prompt_tokens = value.numel()
            return
        self.completion_tokens += value.numel()
        text = self._tokenizer.decode(value.flatten())
        self._handler.frame({"choices": [{"index": 0, "delta": {"content": text}}]})

    def end(self) -> None:
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        self._handler.frame({"choices": [], "usage": usage})


class Handler(BaseHTTPRequestHandler):
    generator: Generator

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        generator = self.generator
        generator.answer(body["messages"], body["max_tokens"], Frames(generator.tokenizer, self))
        self.wfile.write(b"data: [DONE]\n\n")

    def frame(self, content: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """A line for every request would be all that the log holds."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Handler.generator = Generator(arguments.model)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
