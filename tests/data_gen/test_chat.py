"""Conversations become the ids that the served model sees; the template says where a user's turn begins and ends."""

import pytest
from tokenizers import processors

from data_gen.chat import encode_prompt, tokenizer_digests, user_turn
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


def test_a_conversation_that_the_template_refuses_is_an_error():
    with pytest.raises(ValueError, match=r"refuses roles \['system', 'user'\]: no system role"):
        encode_prompt(tokenizer_with(GEMMA), [{"role": "system", "content": "x"}, *USER])


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
    assert (turn.header_ids, turn.end_token_id) == (header, IM_END_ID)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "needs a chat template"),
        (LLAMA2, r"ends a user turn with ' \[/INST\]', not with a special token"),
        ("{{ messages[0]['content'] }}", "ends a user turn with ''"),
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
