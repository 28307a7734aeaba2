#include "base/cpu.h"

#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/file.h"
#include "base/text.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace kt::inline base {

namespace {

bool bit(uint64_t word, int n) { return (word >> n & 1) != 0; }

// "48K", "2048K", "32M" as sysfs writes cache sizes.
size_t parse_cache_size(std::string_view word) {
  size_t value = 0;
  const auto end = std::from_chars(word.data(), word.data() + word.size(), value);
  if (end.ec != std::errc()) return 0;
  const char unit = end.ptr < word.data() + word.size() ? *end.ptr : '\0';
  return unit == 'K' ? value << 10 : unit == 'M' ? value << 20 : unit == 'G' ? value << 30 : value;
}

void read_caches_from_sysfs(CpuFacts& facts) {
  for (int i = 0; i < 8; ++i) {
    const std::string folder = text("/sys/devices/system/cpu/cpu0/cache/index{}/", i);
    const auto level = read_small_file(folder + "level");
    const auto type = read_small_file(folder + "type");
    const auto size = read_small_file(folder + "size");
    if (!level || !type || !size) return;
    if (type->starts_with("Instruction")) continue;
    const size_t bytes = parse_cache_size(*size);
    if (level->starts_with('1')) facts.l1d = bytes;
    if (level->starts_with('2')) facts.l2 = bytes;
    if (level->starts_with('3')) facts.l3 = bytes;
  }
}

#if defined(__x86_64__)

struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros for a leaf this CPU does not have.
Leaf cpuid(uint32_t leaf, uint32_t sub = 0) {
  Leaf out;
  if (!__get_cpuid_count(leaf, sub, &out.eax, &out.ebx, &out.ecx, &out.edx)) return {};
  return out;
}

// XCR0: which register states the operating system saves and restores.
uint64_t enabled_states() {
  if (!bit(cpuid(1).ecx, 27)) return 0;  // OSXSAVE: without it xgetbv faults
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux gives AMX tile data only to a process that asks; the grant covers all its threads, present and
// future.
bool tile_data_granted() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void read_names(CpuFacts& facts) {
  const Leaf first = cpuid(0);
  char vendor[12];
  std::memcpy(vendor, &first.ebx, 4);
  std::memcpy(vendor + 4, &first.edx, 4);
  std::memcpy(vendor + 8, &first.ecx, 4);
  facts.vendor.assign(vendor, sizeof vendor);

  if (cpuid(0x80000000).eax < 0x80000004) return;
  char brand[48];
  for (uint32_t i = 0; i < 3; ++i) {
    const Leaf part = cpuid(0x80000002 + i);
    std::memcpy(brand + 16 * i, &part, 16);
  }
  std::string_view model(brand, strnlen(brand, sizeof brand));
  while (model.starts_with(' ')) model.remove_prefix(1);
  while (model.ends_with(' ')) model.remove_suffix(1);
  facts.model = model;
}

void read_caches(CpuFacts& facts) {
  // Leaf 4 (Intel) and 0x8000001D (AMD) have the same layout.
  const uint32_t leaf = cpuid(4).eax & 31 ? 4 : 0x8000001D;
  for (uint32_t i = 0; i < 8; ++i) {
    const Leaf cache = cpuid(leaf, i);
    const uint32_t type = cache.eax & 31;  // 0 none, 1 data, 2 instruction, 3 unified
    if (type == 0) return;
    if (type == 2) continue;
    const size_t ways = (cache.ebx >> 22) + 1;
    const size_t partitions = (cache.ebx >> 12 & 1023) + 1;
    const size_t line = (cache.ebx & 4095) + 1;
    const size_t bytes = ways * partitions * line * (size_t{cache.ecx} + 1);
    const uint32_t level = cache.eax >> 5 & 7;
    if (level == 1) facts.l1d = bytes;
    if (level == 2) facts.l2 = bytes;
    if (level == 3) facts.l3 = bytes;
  }
}

void read_features(CpuFacts& facts) {
  const uint64_t states = enabled_states();
  const bool ymm = (states & 0x6) == 0x6;          // SSE and AVX
  const bool zmm = (states & 0xe6) == 0xe6;        // and mask registers, upper halves, zmm16-31
  const bool tiles = (states >> 17 & 0x3) == 0x3;  // tile configuration and data

  const Leaf one = cpuid(1), seven = cpuid(7);
  const Leaf seven_one = seven.eax >= 1 ? cpuid(7, 1) : Leaf{};
  facts.sha256 = bit(seven.ebx, 29) && bit(one.ecx, 19) && bit(one.ecx, 9);  // with SSE4.1 and SSSE3
  const bool avx = ymm && bit(one.ecx, 28);
  facts.fma = avx && bit(one.ecx, 12);
  facts.f16c = avx && bit(one.ecx, 29);
  facts.avx2 = avx && bit(seven.ebx, 5);
  facts.avx_vnni = avx && bit(seven_one.eax, 4);

  const bool avx512 = avx && zmm && bit(seven.ebx, 16);
  facts.avx512f = avx512;
  facts.avx512dq = avx512 && bit(seven.ebx, 17);
  facts.avx512bw = avx512 && bit(seven.ebx, 30);
  facts.avx512vl = avx512 && bit(seven.ebx, 31);
  facts.avx512_vbmi = avx512 && bit(seven.ecx, 1);
  facts.avx512_vnni = avx512 && bit(seven.ecx, 11);
  facts.avx512_bf16 = avx512 && bit(seven_one.eax, 5);

  facts.amx_tile = tiles && bit(seven.edx, 24) && tile_data_granted();
  facts.amx_bf16 = facts.amx_tile && bit(seven.edx, 22);
  facts.amx_int8 = facts.amx_tile && bit(seven.edx, 25);
}

#elif defined(__aarch64__)

// The value after "key<spaces>: " in /proc/cpuinfo, of the first cpu; empty if there is none.
std::string_view cpuinfo_value(std::string_view info, std::string_view key) {
  const size_t start = info.find(key);
  if (start == std::string_view::npos) return {};
  const std::string_view line = info.substr(start, info.find('\n', start) - start);
  const size_t colon = line.find(": ");
  return colon == std::string_view::npos ? std::string_view() : line.substr(colon + 2);
}

std::string named(std::string_view code,
                  std::initializer_list<std::pair<std::string_view, std::string_view> > names) {
  for (const auto& [known, name] : names)
    if (known == code) return std::string(name);
  return std::string(code);
}

void read_names(CpuFacts& facts) {
  const std::string info = read_small_file("/proc/cpuinfo").value_or("");
  facts.vendor = named(
      cpuinfo_value(info, "CPU implementer"),
      {{"0x41", "ARM"}, {"0x48", "HiSilicon"}, {"0x4e", "NVIDIA"}, {"0x61", "Apple"}, {"0xc0", "Ampere"}});
  facts.model = named(cpuinfo_value(info, "CPU part"), {{"0xd0c", "Neoverse-N1"},
                                                        {"0xd40", "Neoverse-V1"},
                                                        {"0xd49", "Neoverse-N2"},
                                                        {"0xd4f", "Neoverse-V2"},
                                                        {"0xd83", "Neoverse-V3AE"},
                                                        {"0xd84", "Neoverse-V3"},
                                                        {"0xd8e", "Neoverse-N3"}});
}

void read_caches(CpuFacts&) {}  // user code cannot ask an ARM core; sysfs is the only source

void read_features(CpuFacts& facts) {
  const uint64_t cap = getauxval(AT_HWCAP), cap2 = getauxval(AT_HWCAP2);
  facts.neon = bit(cap, 1);                  // ASIMD
  facts.sha256 = bit(cap, 6);                // SHA2
  facts.fp16 = bit(cap, 9) && bit(cap, 10);  // FPHP and ASIMDHP
  facts.dotprod = bit(cap, 20);              // ASIMDDP
  facts.sve = bit(cap, 22);                  // SVE
  facts.fhm = bit(cap, 23);                  // ASIMDFHM
  facts.i8mm = bit(cap2, 13);                // I8MM
  facts.bf16 = bit(cap2, 14);                // BF16
}

#else

void read_names(CpuFacts&) {}
void read_caches(CpuFacts&) {}
void read_features(CpuFacts&) {}

#endif

}  // namespace

const CpuFacts& cpu() {
  static const CpuFacts facts = [] {
    CpuFacts out;
    read_names(out);
    read_features(out);
    read_caches(out);
    read_caches_from_sysfs(out);  // second, because it knows what a hypervisor really gives
    return out;
  }();
  return facts;
}

void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // "yield" is a no-op on the cores that matter; isb drains the pipeline and takes about as long as x86's
  // pause.
  __asm__ volatile("isb" ::: "memory");
#endif
}

}  // namespace kt::inline base
