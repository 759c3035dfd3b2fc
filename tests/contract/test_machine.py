"""The machine's facts: texts of real processors in, exact names out."""

import dataclasses
import json
import os
import platform
from pathlib import Path

import pytest

from fatdeploy import machine
from fatdeploy.machine import Cpu, Machine, cpu_from_cpuinfo, cpu_from_sysctl, this_machine

# As published for these machines, shortened to one core; the Orin's text is combined from two sources.
XEON_E5_2682 = """\
processor	: {index}
vendor_id	: GenuineIntel
cpu family	: 6
model		: 79
model name	: Intel(R) Xeon(R) CPU E5-2682 v4 @ 2.50GHz
stepping	: 1
cache size	: 40960 KB
fpu		: yes
flags		: fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ss \
ht syscall nx pdpe1gb rdtscp lm constant_tsc rep_good nopl eagerfpu pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 \
x2apic movbe popcnt tsc_deadline_timer aes xsave avx f16c rdrand hypervisor lahf_lm abm 3dnowprefetch ibrs ibpb stibp \
fsgsbase tsc_adjust bmi1 hle avx2 smep bmi2 erms invpcid rtm rdseed adx smap xsaveopt spec_ctrl intel_stibp
bogomips	: 4988.44
address sizes	: 46 bits physical, 48 bits virtual
power management:

"""
CORE_I7_1165G7 = """\
processor	: {index}
vendor_id	: GenuineIntel
cpu family	: 6
model		: 140
model name	: 11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz
flags		: fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ss \
ht syscall nx pdpe1gb rdtscp lm constant_tsc arch_perfmon rep_good nopl xtopology tsc_reliable \
nonstop_tsc cpuid pni pclmulqdq ssse3 fma cx16 pdcm pcid sse4_1 sse4_2 movbe popcnt aes xsave avx \
f16c rdrand hypervisor lahf_lm abm 3dnowprefetch invpcid_single ssbd ibrs ibpb stibp ibrs_enhanced \
fsgsbase bmi1 avx2 smep bmi2 erms invpcid avx512f avx512dq rdseed adx smap avx512ifma clflushopt \
clwb avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves avx512vbmi umip avx512_vbmi2 \
gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq rdpid fsrm avx512_vp2intersect \
md_clear flush_l1d arch_capabilities
bugs		: spectre_v1 spectre_v2 spec_store_bypass swapgs retbleed eibrs_pbrsb gds

"""
RASPBERRY_PI_5 = """\
processor	: {index}
BogoMIPS	: 108.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x4
CPU part	: 0xd0b
CPU revision	: 1

"""
JETSON_ORIN = """\
processor	: {index}
model name	: ARMv8 Processor rev 1 (v8l)
BogoMIPS	: 62.50
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp \
uscat ilrcpc flagm paca pacg
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd42
CPU revision	: 1

"""
RASPBERRY_PI_2 = """\
processor	: {index}
model name	: ARMv7 Processor rev 5 (v7l)
BogoMIPS	: 38.40
Features	: half thumb fastmult vfp edsp neon vfpv3 tls vfpv4 idiva idivt vfpd32 lpae evtstrm
CPU implementer	: 0x41
CPU architecture: 7
CPU variant	: 0x0
CPU part	: 0xc07
CPU revision	: 5

"""
VISIONFIVE_2 = """\
processor	: {index}
hart		: 1
isa		: rv64imafdc_zicntr_zicsr_zifencei_zihpm_zba_zbb
mmu		: sv39
uarch		: sifive,u74-mc

"""
APPLE_M3 = """\
machdep.cpu.cores_per_package: 8
machdep.cpu.brand_string: Apple M3
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.arm.FEAT_SME2: 0
hw.optional.floatingpoint: 1
hw.optional.neon: 1
"""
INTEL_MAC = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i5-10400 CPU @ 2.90GHz
machdep.cpu.features: FPU VME DE SSE SSE2 SSE3 PCLMULQDQ SSSE3 FMA CX16 SSE4.1 SSE4.2 MOVBE AES XSAVE AVX1.0 RDRAND F16C
machdep.cpu.leaf7_features: RDWRFSGS TSC_THREAD_OFFSET SGX BMI1 AVX2 SMEP BMI2 ERMS INVPCID FPU_CSDS MPX RDSEED
hw.optional.avx2_0: 1
"""
AVX2 = ("sse4_1", "avx", "avx2", "fma", "f16c")


def two_cores(text: str) -> str:
    return text.format(index=0) + text.format(index=1)


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        (XEON_E5_2682, "Intel(R) Xeon(R) CPU E5-2682 v4 @ 2.50GHz", AVX2),
        (CORE_I7_1165G7, "11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", (*AVX2, "avx512f", "avx512_vnni")),
        (RASPBERRY_PI_5, "Cortex-A76", ("asimd", "asimdhp", "asimddp")),
        (JETSON_ORIN, "Cortex-A78AE", ("asimd", "asimdhp", "asimddp")),
        (RASPBERRY_PI_2, "Cortex-A7", ("neon",)),
    ],
    ids=["x86-avx2-without-vnni", "x86-vnni", "raspberry-pi-5", "jetson-orin", "32-bit-arm"],
)
def test_cpuinfo_gives_the_name_and_the_instruction_sets_that_matter(
    text: str, name: str, features: tuple[str, ...]
) -> None:
    assert cpu_from_cpuinfo(two_cores(text)) == Cpu(name, features)


def test_the_line_that_a_raspberry_pi_adds_about_its_board_is_not_the_processor() -> None:
    text = two_cores(RASPBERRY_PI_5) + "Revision	: c04170\nModel		: Raspberry Pi 5 Model B Rev 1.0\n"
    assert cpu_from_cpuinfo(text).name == "Cortex-A76"


def test_big_and_little_cores_are_both_named_and_only_shared_features_count() -> None:
    little = RASPBERRY_PI_5.format(index=0).replace("0xd0b", "0xd05").replace(" asimddp", "")
    assert cpu_from_cpuinfo(little + RASPBERRY_PI_5.format(index=1)) == Cpu(
        "Cortex-A55 + Cortex-A76", ("asimd", "asimdhp")
    )


def test_an_unlisted_arm_core_is_shown_by_its_numbers() -> None:
    text = RASPBERRY_PI_5.format(index=0).replace("0xd0b", "0xfff")
    assert cpu_from_cpuinfo(text).name == "arm implementer 0x41 part 0xfff"


@pytest.mark.parametrize("text", [VISIONFIVE_2, "", "no colon here"], ids=["risc-v", "empty", "not-cpuinfo"])
def test_unreported_instruction_sets_are_unknown_instead_of_empty(text: str) -> None:
    assert cpu_from_cpuinfo(text.format(index=0)) == Cpu(None, None)


def test_a_processor_with_none_of_them_has_an_empty_list() -> None:
    assert cpu_from_cpuinfo("model name : Pentium\nflags : fpu vme\n") == Cpu("Pentium", ())


def test_macos_gives_the_same_names_as_linux() -> None:
    assert cpu_from_sysctl(APPLE_M3) == Cpu("Apple M3", ("asimd", "asimdhp", "asimddp", "i8mm", "bf16"))
    assert cpu_from_sysctl(INTEL_MAC) == Cpu("Intel(R) Core(TM) i5-10400 CPU @ 2.90GHz", AVX2)
    assert cpu_from_sysctl("") == Cpu(None, None)


def test_every_translated_macos_feature_is_a_shown_feature() -> None:
    assert {*machine.SYSCTL_WORDS.values(), *machine.SYSCTL_SWITCHES.values()} <= set(machine.FEATURES)


def test_a_system_that_reports_nothing_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert machine.this_cpu() == Cpu(None, None)


def test_macos_features_come_from_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine, "sysctl_text", lambda: APPLE_M3)
    assert machine.this_cpu().name == "Apple M3"


def test_unreported_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf_names", {})
    assert machine.total_memory() is None


def test_a_board_is_named_without_the_nul_that_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").write_bytes(b"Raspberry Pi 5 Model B Rev 1.0\0")
    monkeypatch.setattr(machine, "BOARD", tmp_path / "model")
    assert this_machine().board == "Raspberry Pi 5 Model B Rev 1.0"
    monkeypatch.setattr(machine, "BOARD", tmp_path / "absent")
    assert this_machine().board is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process to a core")
def test_cores_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert this_machine().cores == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert this_machine().cores == len(allowed)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="there is no /proc/meminfo to compare with")
def test_memory_is_the_kernel_s_total() -> None:
    total = int(dict(machine.rows_of(Path("/proc/meminfo").read_text()))["MemTotal"].removesuffix(" kB")) * 1024
    assert this_machine().memory_bytes == total


def test_the_facts_survive_json() -> None:
    facts = this_machine()
    assert [field.name for field in dataclasses.fields(Machine)] == list(facts.as_dict())
    back = json.loads(json.dumps(facts.as_dict()))
    features = None if back["features"] is None else tuple(back["features"])
    assert Machine(**{**back, "features": features}) == facts
