"""A conversation on kept state: each turn feeds only its own tokens to the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lolcats.errors import UserError
from lolcats.generation.engine import Engine
from lolcats.generation.request import Request, Result, Snapshot, chat_text
from lolcats.generation.sampling import SamplingParams

Message = dict[str, str]


@dataclass
class Chat:
    """Turns of a conversation, and the model's state after the latest.

    The state already holds the earlier turns, so that a turn feeds what the chat template writes after the last
    answer: its end, the new message, the beginning of the next answer. If the template rewrites earlier turns,
    the whole conversation is fed again.

    Attributes:
        messages: the conversation.
        rendered: its text as the model saw it, up to the beginning of the last answer.
        snapshot: the state after the last answer.
        result: of the latest turn.
        fed_again: whether the latest turn had to feed the whole conversation again.
    """

    engine: Engine
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    rendered: str = ""
    snapshot: Snapshot | None = None
    result: Result | None = None
    fed_again: bool = False
    _request: Request | None = None

    def __post_init__(self) -> None:
        chat_text(self.engine.tokenizer, "")  # refuses tokenizers without a template
        if not self.messages:
            self.reset()

    def reset(self) -> None:
        """Forget the conversation; a system message stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.rendered, self.snapshot = "", None

    def ask(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Pieces of the answer to `text`; the turn is kept when the last one was taken.

        Raises:
            UserError: the model failed, or the chat template does not take the conversation.
            ValueError: the conversation has become longer than the engine allows.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = chat_text(self.engine.tokenizer, messages)
        after = self._after_last_answer(rendered)
        self.fed_again = self.snapshot is not None and after is None
        snapshot = None if after is None else self.snapshot
        if snapshot is not None and snapshot.token_ids[-1] in self.engine.end_tokens:
            # The model's own end token; it is not fed yet, and the template writes the end that it wants.
            snapshot = replace(snapshot, token_ids=snapshot.token_ids[:-1])
        prompt = self.engine.encode(rendered if after is None else after, special=False)
        self._request = self.engine.submit(prompt, params.changed(keep_state=True), snapshot=snapshot)
        yield from self._request
        self.result, self._request = self._request.result(), None
        if self.result.finish_reason == "error":
            raise UserError(f"the model failed: {self.result.error}")
        if self.result.snapshot is not None and self.result.token_ids:  # else cancelled before its first token
            self.messages = [*messages, {"role": "assistant", "content": self.result.text}]
            self.rendered, self.snapshot = rendered, self.result.snapshot

    def cancel(self) -> None:
        """End the answer that is being written; what there is of it is kept."""
        if self._request is not None:
            self._request.cancel()

    def _after_last_answer(self, rendered: str) -> str | None:
        """What the template writes after the last answer; None: it changes what came before, or there is none."""
        if self.snapshot is None or not rendered.startswith(self.rendered):
            return None
        rest, answer = rendered[len(self.rendered) :], self.messages[-1]["content"]
        for written in (answer, answer.rstrip(), answer.strip()):  # templates may trim it
            if rest.startswith(written):
                return rest[len(written) :]
        return None
