"""How one row wants its tokens chosen and when it wants to stop."""

from dataclasses import dataclass

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_SAMPLES = 100_000
"""Every sample is a row of the output: more of one prompt than this is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one row; hashable, so that rows with equal settings share one object.

    Raises:
        ValueError: a value outside its range; the message names the option as the user types it.
    """

    max_tokens: int = 256
    """Most output tokens, the end token included; at least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in the prompt or output; above 0."""
    presence_penalty: float = 0.0
    """Subtract from the logit of each token that occurs in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtract per occurrence in the output; in [-2, 2]."""
    n: int = 1
    """Samples per row; 1 to MAX_SAMPLES."""
    seed: int | None = None
    """The row's own seed; None draws from the job's seed and the row's index."""
    stop: tuple[str, ...] = ()
    """Strings that end the output where they first appear."""
    include_stop: bool = False
    """Keep the stop string in the output."""
    ignore_eos: bool = False
    """Go on past end tokens, up to max_tokens."""

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.max_tokens <= MAX_COUNT, "--max-tokens", self.max_tokens, f"between 1 and {MAX_COUNT}"),
            (0.0 <= self.temperature < float("inf"), "--temperature", self.temperature, "0 (greedy) or more"),
            (0.0 < self.top_p <= 1.0, "--top-p", self.top_p, "above 0 and at most 1"),
            (0 <= self.top_k <= MAX_COUNT, "--top-k", self.top_k, f"between 0 (all) and {MAX_COUNT}"),
            (0.0 <= self.min_p <= 1.0, "--min-p", self.min_p, "between 0 and 1"),
            (0.0 < self.repetition_penalty < float("inf"), "--repetition-penalty", self.repetition_penalty, "above 0"),
            (-2.0 <= self.presence_penalty <= 2.0, "--presence-penalty", self.presence_penalty, "between -2 and 2"),
            (-2.0 <= self.frequency_penalty <= 2.0, "--frequency-penalty", self.frequency_penalty, "between -2 and 2"),
            (1 <= self.n <= MAX_SAMPLES, "--n", self.n, f"between 1 and {MAX_SAMPLES}"),
            (self.seed is None or 0 <= self.seed <= MAX_SEED, "--seed", self.seed, "between 0 and 2^63 - 1"),
            (all(self.stop), "--stop", "''", "a string of at least one character"),
        )
        for fine, option, value, wanted in checks:
            if not fine:
                raise ValueError(f"{option} is {value}: it must be {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether equal prompts give equal outputs whatever the seed."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
