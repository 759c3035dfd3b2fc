"""Languages of the multilingual families: their codes, and how a source and a target name them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fatdeploy.export.models.hugging_face.text.settings import TokenizerSettings
from fatdeploy.text import Languages

MBART_CODES = """
ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX ro_RO
ru_RU si_LK tr_TR vi_VN zh_CN
"""
MBART50_CODES = """
af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN
th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""
M2M100_CODES = """
af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig
ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so
sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""
MBART = MBART_CODES.split()
MBART50 = [*MBART, *MBART50_CODES.split()]
M2M100 = {"m2m100": M2M100_CODES.split(), "wmt21": ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"]}
PLBART = {
    "base": ["java", "python", "en_XX"],
    "multi": ["java", "python", "en_XX", "javascript", "php", "ruby", "go"],
}


@dataclass(frozen=True)
class LanguageFamily:
    """How a family names its languages: the form of a token, and the places."""

    token: re.Pattern[str]
    source: Literal["prefix", "suffix", "none"]
    target: Literal["forced_bos", "start", "marker"]
    default_source: str | None = None


FAMILIES = {
    "MBartTokenizer": LanguageFamily(re.compile(r"([a-z]{2}_[A-Z]{2})"), "suffix", "start", "en_XX"),
    "MBart50Tokenizer": LanguageFamily(re.compile(r"([a-z]{2}_[A-Z]{2})"), "prefix", "forced_bos", "en_XX"),
    "NllbTokenizer": LanguageFamily(re.compile(r"([a-z]{3}_[A-Z][a-z]{3})"), "prefix", "forced_bos", "eng_Latn"),
    "M2M100Tokenizer": LanguageFamily(re.compile(r"__([a-z]{2,3})__"), "prefix", "forced_bos", "en"),
    "PLBartTokenizer": LanguageFamily(re.compile(r"__(\w+?)__"), "suffix", "start"),
    "MarianTokenizer": LanguageFamily(re.compile(r">>(.+)<<"), "none", "marker"),
}


def languages_of(settings: TokenizerSettings, ids: Mapping[str, int], end_id: int) -> Languages | None:
    """Return the languages among special tokens; None if there are none."""
    family = FAMILIES.get(settings.tokenizer_class)
    if family is None:
        return None
    codes = {match[1]: token for name, token in ids.items() if (match := family.token.fullmatch(name))}
    if not codes:
        return None
    place = family.source
    if settings.tokenizer_class == "NllbTokenizer" and settings.tokenizer.get("legacy_behaviour") is True:
        place = "suffix"
    first = "forced_bos_token_id" if family.target == "forced_bos" else "decoder_start_token_id"
    first_id = None if family.target == "marker" else settings.generation.get(first)
    return Languages(
        ids=codes,
        source=place,
        target=family.target,
        end_id=end_id,
        default_source=_known(settings.tokenizer.get("src_lang") or family.default_source, codes),
        default_target=next((code for code, token in codes.items() if token == first_id), None),
    )


def _known(code: object, codes: Mapping[str, int]) -> str | None:
    return code if isinstance(code, str) and code in codes else None
