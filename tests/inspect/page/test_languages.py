"""The language of a caption: by its script, else by its commonest words, and never by a guess."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppldm.inspect.measure import NONE, find_language


@pytest.mark.parametrize(
    "caption, language",
    [
        ("a red circle above a small blue square", "en"),
        ("Portrait of the young woman with an umbrella", "en"),
        ("Ein Hund und eine Katze auf dem Sofa", "de"),
        ("le chat noir dans la rue", "fr"),
        ("el perro y la casa de mi abuela", "es"),
        ("il gatto e la luna sono nel giardino", "it"),
        ("uma mulher com um cão em casa", "pt"),
        ("een hond en het huis van de buren", "nl"),
        ("kot na krześle w kuchni nie śpi", "pl"),
        ("bir kedi ve çok güzel çiçek", "tr"),
        ("một con mèo trên bàn và những bông hoa", "vi"),
        ("Красивый вид на море и горы", "ru"),
        ("Гарний краєвид на море і гори", "uk"),
        ("صورة من البحر مع هذا الرجل", "ar"),
        ("گربه در خانه است", "fa"),
        ("美しい夕日の写真", "ja"),
        ("红色的心", "zh"),
        ("빨간 하트", "ko"),
        ("แมวดำ", "th"),
        ("η γάτα", "el"),
        ("iPhone 红色的手机壳保护套", "zh"),
        ("红色的 circle", "zh"),
        ("Canon EOS 5D Mark IV", "other Latin"),
        ("the gallery com sunset", "other Latin"),  # a common word of English, and one of Portuguese
        ("Москва 1980", "other Cyrillic"),
        ("12 345 !? 😀", NONE),
        ("", NONE),
    ],
)
def test_the_language_of_a_caption(caption, language):
    assert find_language(caption) == language


@given(st.text(max_size=60))
def test_every_text_gets_an_answer(text):
    assert find_language(text)
