// gptq_probe: calibrated rounding between two pipes, for tests in other languages.
//   gptq_probe FORMAT n k rows DAMPING ACT_ORDER SCALE_STEPS LEAST_SCALE
// FORMAT: a format's name, or w4a16_g128 or w8a16_g128: what compressed-tensors has, by its rule.
// In: f32 values [n, k], then f32 inputs [rows, k]. Out: f32 H [k, k] (lower triangle), codes, scales and
// mins (formats/matrix.h), f64 [2]: the damping that worked and output_error().
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/function_ref.h"
#include "nn/gptq.h"

namespace {

std::vector<float> read(int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  if (std::fread(out.data(), sizeof(float), out.size(), stdin) != out.size())
    kt::fail("expected {} floats", count);
  return out;
}

void write(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, stdout) != bytes) kt::fail("could not write {} bytes", bytes);
}

kt::Format packed(kt::Code code, int bias) {
  return {code, bias, kt::Scale::kBf16, kt::Min::kNone, {.k = 128}};
}

void run(char** arguments) {
  const std::string_view name = arguments[0];
  const bool four = name == "w4a16_g128", eight = name == "w8a16_g128";
  const kt::Format format = four    ? packed(kt::Code::kU4, 8)
                            : eight ? packed(kt::Code::kI8, 0)
                                    : kt::format_named(arguments[0]);
  const int64_t n = std::atoll(arguments[1]), k = std::atoll(arguments[2]), rows = std::atoll(arguments[3]);
  const std::vector<float> values = read(n * k), x = read(rows * k);
  kt::Hessian hessian(static_cast<int>(k));
  hessian.add({.x = x.data(), .type = kt::Real::kF32, .rows = rows});
  const kt::GptqFactor factor(hessian, {.damping = std::atof(arguments[4]),
                                        .act_order = std::atoi(arguments[5]) != 0,
                                        .scale_steps = std::atoi(arguments[6]),
                                        .least_scale = std::atof(arguments[7]),
                                        .packed_rule = four || eight});
  const kt::Matrix out = kt::gptq(format, values, n, k, factor);
  write(hessian.data(), kt::Hessian::bytes(hessian.dims()));
  write(out.codes.data(), out.codes.size());
  write(out.scales.data(), out.scales.size());
  write(out.mins.data(), out.mins.size());
  const double numbers[] = {factor.damping(), kt::output_error(values, out.view(), hessian)};
  write(numbers, sizeof(numbers));
}

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double best_of_five(kt::FunctionRef<void()> work) {
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    const double start = cpu_seconds();
    work();
    best = std::min(best, cpu_seconds() - start);
  }
  return best;
}

void time(char** arguments) {
  const int dims = std::atoi(arguments[0]);
  const int64_t rows = std::atoll(arguments[1]), n = std::atoll(arguments[2]);
  std::mt19937 random(1);
  std::vector<uint16_t> x(static_cast<size_t>(rows * dims));  // bf16 from 1 to 2 of either sign
  for (uint16_t& value : x) value = static_cast<uint16_t>(0x3F80 + (random() & 0x807F));
  std::vector<float> values(static_cast<size_t>(n * dims));
  for (float& value : values) value = std::normal_distribution<float>()(random);
  const kt::Kernels& kernels = kt::best_kernels();
  kt::Buffer scratch, operands(1 << 16);
  const auto peak = kernels.peak_bf16 ? kernels.peak_bf16 : kernels.peak_f32;
  double operations = 0;
  const double peak_s = best_of_five([&] { operations = peak(30000, operands.data()); });
  kt::Hessian hessian(dims);
  const double add_s =
      best_of_five([&] { hessian.add({.x = x.data(), .type = kt::Real::kBf16, .rows = rows}, &scratch); });
  const kt::GptqOptions options = kt::CalibrationDefaults().gptq;
  const double factor_s = best_of_five([&] { kt::GptqFactor(hessian, options); });
  const kt::GptqFactor factor(hessian, options);
  const double round_s =
      best_of_five([&] { kt::gptq(kt::format_named("int4_g128"), values, n, dims, factor); });
  const double d = dims, add = d * (d + 1) * static_cast<double>(rows) / add_s;
  std::printf("%s: peak %.0f GFLOP/s\n", kernels.name, operations / peak_s / 1e9);
  std::printf("hessian %d x %lld: %.2f ms, %.0f GFLOP/s, %.1f %% of the peak\n", dims,
              static_cast<long long>(rows), add_s * 1e3, add / 1e9, 100 * add * peak_s / operations);
  std::printf("factor: %.1f ms, %.1f GFLOP/s\n", factor_s * 1e3, d * d * d / 3 / factor_s / 1e9);
  std::printf("rounding [%lld, %d]: %.1f ms, %.1f GFLOP/s\n", static_cast<long long>(n), dims, round_s * 1e3,
              static_cast<double>(n) * d * d / round_s / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const bool times = argc == 5 && std::string_view(argv[1]) == "time";
  if (argc != 9 && !times) {
    std::fputs(
        "gptq_probe FORMAT n k rows DAMPING ACT_ORDER SCALE_STEPS LEAST_SCALE\ngptq_probe time DIMS ROWS N\n",
        stderr);
    return 2;
  }
  try {
    if (times) {
      time(argv + 2);
    } else {
      run(argv + 1);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
