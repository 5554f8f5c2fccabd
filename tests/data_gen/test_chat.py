"""Conversations become the ids that the served model sees; the template says where a user's turn begins and ends."""

import pytest
from tokenizers import processors

from data_gen.chat import encode_prompt, encode_prompts, user_turn
from specvocab_model.chat_template import tokenizer_digests
from specvocab_model.config import ConfigError
from tests.tiny import CHAT_TEMPLATE, ENDOFTEXT_ID, IM_END_ID, IM_START_ID, tiny_tokenizer

USER = [{"role": "user", "content": "Hi"}]
BOS = "<|endoftext|>"
LLAMA2 = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)


def tokenizer_with(chat_template):
    """The tiny tokenizer with another template, and one that puts BOS in front of plain text, as Llama's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.bos_token = BOS
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, ENDOFTEXT_ID)]
    )
    return tokenizer


# What the shipped targets' templates make of a user's message, in our own words.
QWEN3 = CHAT_TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    + CHAT_TEMPLATE
)
LLAMA31 = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday: 26 Jul 2024\\n\\n<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SHIPPED = {  # template, special tokens that the tiny tokenizer lacks, header, end, whether that is a special token
    "qwen3": (QWEN3, [], "<|im_start|>user\n", "<|im_end|>", True),
    "smollm2": (SMOLLM2, [], "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n", "<|im_end|>", True),
    "llama31": (
        LLAMA31, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        f"{BOS}<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>", True,
    ),
    "olmo2": (OLMO2, [], f"{BOS}<|user|>\n", "<|assistant|>", False),
}


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_a_conversation_ends_where_the_answer_begins():
    expected = [IM_START_ID, *ids_of("user\nHi"), IM_END_ID, *ids_of("\n"), IM_START_ID, *ids_of("assistant\n")]
    assert encode_prompt(tiny_tokenizer(), USER) == expected


def test_bos_comes_once_with_and_without_a_template():
    templated = encode_prompt(tokenizer_with(GEMMA), USER)
    assert templated == [ENDOFTEXT_ID, IM_START_ID, *ids_of("user\nHi"), IM_END_ID, *ids_of("\n"), IM_START_ID,
                         *ids_of("model\n")]
    assert encode_prompt(tokenizer_with(None), USER) == [ENDOFTEXT_ID, *ids_of("Hi")]


def test_without_a_template_a_conversation_is_plain_text():
    messages = [*USER, {"role": "assistant", "content": " there"}, {"role": "user", "content": "Go on"}]
    assert encode_prompt(tokenizer_with(None), messages) == [ENDOFTEXT_ID, *ids_of("Hi\n\n there\n\nGo on")]
    with pytest.raises(ValueError, match="tools are described by a chat template, and this tokenizer has none"):
        encode_prompt(tokenizer_with(None), USER, tools=[{"type": "function"}])


def test_without_a_template_the_first_line_after_bos_is_invented():
    turn = user_turn(tokenizer_with(None))
    assert (turn.header_ids, turn.stop_token_ids((7,))) == ([ENDOFTEXT_ID], (7,))
    assert turn.words("A title \nA text", "length") == "A title"
    assert turn.words("A text without an end", "length") is None
    plain = tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="needs a chat template, or a BOS that a text begins with"):
        user_turn(plain)


def test_a_template_that_writes_the_date_always_writes_the_same():
    tokenizer = tokenizer_with("{{ strftime_now( '%d %B %Y' ) if strftime_now is defined }}, "
                               '{{ strftime_now("%Y-%m-%d") }}' + CHAT_TEMPLATE)
    text = tokenizer.decode(encode_prompt(tokenizer, USER))
    assert text.startswith("01 January 2026, 2026-01-01<|im_start|>user\nHi")


def test_a_conversation_that_the_template_refuses_is_an_error():
    with pytest.raises(ValueError, match=r"refuses roles \['system', 'user'\]: no system role"):
        encode_prompt(tokenizer_with(GEMMA), [{"role": "system", "content": "x"}, *USER])


@pytest.mark.parametrize("template", [GEMMA, CHAT_TEMPLATE, None])
@pytest.mark.parametrize("tools", [(), ({"name": "clock"},)])
def test_conversations_together_are_what_each_is_alone(template, tools):
    tokenizer = tokenizer_with(template)
    system = {"role": "system", "content": "Be brief."}
    conversations = [USER, [system, *USER], [{"role": "user", "content": "é <|im_end|> " * 9}], [], USER * 3]

    def alone(messages) -> list[int] | str:
        try:
            return encode_prompt(tokenizer, messages, None, tools)
        except ValueError as error:
            return str(error)

    for some in (conversations, conversations[:1], conversations[2:3] * 4, []):
        together = encode_prompts(tokenizer, some, None, tools)
        assert [str(each) if isinstance(each, ValueError) else each for each in together] == list(map(alone, some))


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (CHAT_TEMPLATE, [IM_START_ID, *ids_of("user\n")]),
        ("<|im_start|>system\nBe kind.<|im_end|>\n" + CHAT_TEMPLATE,
         [IM_START_ID, *ids_of("system\nBe kind."), IM_END_ID, *ids_of("\n"), IM_START_ID, *ids_of("user\n")]),
        (GEMMA, [ENDOFTEXT_ID, IM_START_ID, *ids_of("user\n")]),
        (LLAMA2.replace(" [/INST]", "<|im_end|>"), [ENDOFTEXT_ID, *ids_of("[INST]")]),
    ],
    ids=["chatml", "default-system", "bos", "space-before-content"],
)
def test_the_header_of_a_user_turn(template, header):
    turn = user_turn(tokenizer_with(template))
    assert (turn.header_ids, turn.end_token_id, turn.end_text) == (header, IM_END_ID, "<|im_end|>")
    assert turn.stop_token_ids((7, IM_END_ID)) == (IM_END_ID, 7)


@pytest.mark.parametrize(("template", "special_tokens", "header", "end", "is_special"), SHIPPED.values(), ids=SHIPPED)
def test_the_user_turn_of_every_shipped_template(template, special_tokens, header, end, is_special):
    tokenizer = tokenizer_with(template)
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens})
    turn = user_turn(tokenizer)
    assert turn.header_ids == tokenizer(header, add_special_tokens=False)["input_ids"]
    assert turn.end_text == end
    assert turn.end_token_id == (tokenizer.convert_tokens_to_ids(end) if is_special else None)

    asked = encode_prompt(tokenizer, USER)  # what a model writes that goes on as the template does
    assert asked[: len(turn.header_ids)] == turn.header_ids
    continuation = asked[len(turn.header_ids) :]
    stops = [place for place, token in enumerate(continuation) if token in turn.stop_token_ids((7,))]
    assert bool(stops) == is_special
    continuation, finish_reason = (continuation[: stops[0] + 1], "stop") if stops else (continuation, "length")
    text = tokenizer.decode(continuation, skip_special_tokens=True)
    assert turn.words(text, finish_reason) == "Hi"
    assert turn.words("Hi, how", "length") is None
    assert turn.words("Hi\n", "stop") == "Hi"  # by another EOS


def test_a_special_token_on_the_line_after_the_words_ends_the_turn():
    turn = user_turn(tokenizer_with("{{ messages[0]['content'] + '\\n<|im_start|>' }}"))
    assert (turn.end_token_id, turn.end_text) == (IM_START_ID, "<|im_start|>")


def test_variables_of_the_template():
    tokenizer = tokenizer_with(QWEN3)
    thinking = encode_prompt(tokenizer, USER)
    assert encode_prompt(tokenizer, USER, {"enable_thinking": True}) == thinking
    assert encode_prompt(tokenizer, USER, {"enable_thinking": False}) == [
        *thinking, *ids_of("<think>\n\n</think>\n\n")]
    header = "{{ '[' + mood + ']' if mood }}" + CHAT_TEMPLATE
    assert user_turn(tokenizer_with(header), {"mood": "x"}).header_ids[:3] == ids_of("[x]")


@pytest.mark.parametrize("template", [QWEN3, None])
def test_a_variable_that_the_template_does_not_have_is_refused(template):
    with pytest.raises(ConfigError, match=r"sets 'thinking', which the target's chat template never reads"):
        encode_prompt(tokenizer_with(template), USER, {"thinking": False})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0]['content'] + '\\n' }}", r"ends a user turn with '\\n': nothing tells where the answer"),
        ("{{ raise_exception('no user') }}", r"refuses roles \['user'\]: no user"),
        (CHAT_TEMPLATE + CHAT_TEMPLATE, "shows a user's words 2 times"),
        ("{{ messages[0]['content'] | upper }}", "shows a user's words 0 times"),
    ],
)
def test_templates_that_do_not_say_where_a_turn_ends_are_refused(template, reason):
    with pytest.raises(ValueError, match=reason):
        user_turn(tokenizer_with(template))


def test_digests_see_the_vocabulary_and_the_template():
    plain, other_template, longer = tiny_tokenizer(), tokenizer_with(GEMMA), tiny_tokenizer()
    longer.add_tokens(["<extra>"])
    digests = [tokenizer_digests(tokenizer) for tokenizer in (plain, other_template, longer)]
    assert digests[0] == tokenizer_digests(tiny_tokenizer())
    assert len({digest["vocabulary_sha256"] for digest in digests}) == 2
    assert len({digest["chat_template_sha256"] for digest in digests}) == 2
