"""Sentences by rules: where a text is cut, and that nothing but the sentences changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fatdeploy.runtimes.text.sentences import split_sentences
from tests.support.text.texts import ANY_TEXT


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Dr. Smith met J. R. R. Tolkien. They spoke.", ["Dr. Smith met J. R. R. Tolkien.", "They spoke."]),
        ("It cost $3.50 at v1.2.3 of www.example.com. Good.", ["It cost $3.50 at v1.2.3 of www.example.com.", "Good."]),
        ("He came at 5 p.m. on Monday. Then he left.", ["He came at 5 p.m. on Monday.", "Then he left."]),
        ("He said no. Then yes. See no. 5 below.", ["He said no.", "Then yes.", "See no. 5 below."]),
        ('"Really?" he asked. "Yes!" She ran.', ['"Really?" he asked.', '"Yes!"', "She ran."]),
        ("(It was late.) He slept [deeply.] Well", ["(It was late.)", "He slept [deeply.]", "Well"]),
        ("Wait... what? No… Yes.", ["Wait... what?", "No…", "Yes."]),
        ("1. First item. Second.", ["1. First item.", "Second."]),
        ("Am 3. Mai kam z. B. der Hund. Ende", ["Am 3. Mai kam z. B. der Hund.", "Ende"]),
        ("We chose plan b. Then c.", ["We chose plan b.", "Then c."]),
        ("今天天气很好。我们去公园吧！「好的。」他说。", ["今天天气很好。", "我们去公园吧！", "「好的。」", "他说。"]),
        ("本当？！はい。", ["本当？！", "はい。"]),
        ("यह एक है। यह दो है।", ["यह एक है।", "यह दो है।"]),
        ("no stop at all", ["no stop at all"]),
        ("... and so on", ["... and so on"]),
        ("", []),
        (" \n\t", []),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(text: str, sentences: list[str]) -> None:
    assert list(split_sentences(text).sentences) == sentences


@given(ANY_TEXT | st.text("ab. \n\r\t!?。「」\"'A1…\u2028"))
def test_everything_that_is_not_a_sentence_stays(text: str) -> None:
    split = split_sentences(text)
    assert len(split.around) == len(split.sentences) + 1
    parts = [part for pair in zip(split.around, split.sentences, strict=False) for part in pair]
    assert "".join(parts) + split.around[-1] == text
    assert all(sentence == sentence.strip() != "" for sentence in split.sentences)
    assert all(not space.strip() for space in split.around)
    assert not any("\n" in sentence for sentence in split.sentences)


@pytest.mark.parametrize(
    ("text", "translations", "joined"),
    [
        ("Eins.   Zwei.\n\n  Drei.\n", ["One.", "Two.", "Three."], "One. Two.\n\n  Three.\n"),
        ("一。二。\r\n三。", ["One.", "Two.", "Three."], "One. Two.\r\nThree."),
        ("One here. Two.", ["一。", "二。"], "一。二。"),
        ("One here. Two.", ["一。", "Zwei."], "一。Zwei."),
        ("One here. Two. Three.", ["Eins.", "", "Drei."], "Eins.Drei."),
        ("  \n", [], "  \n"),
    ],
)
def test_translations_are_joined_in_the_lines_of_the_text(text: str, translations: list[str], joined: str) -> None:
    assert split_sentences(text).joined(translations) == joined
