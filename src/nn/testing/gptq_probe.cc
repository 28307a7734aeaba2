// gptq_probe: calibrated rounding between two pipes, for tests in other languages.
//   gptq_probe FORMAT n k rows DAMPING ACT_ORDER SCALE_STEPS LEAST_SCALE
// In: f32 values [n, k], then f32 inputs [rows, k]. Out: f32 H [k, k] (lower triangle), codes, scales and
// mins (formats/matrix.h), f64 [2]: the damping that worked and output_error().
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "base/error.h"
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

void run(char** arguments) {
  const kt::Format format = kt::format_named(arguments[0]);
  const int64_t n = std::atoll(arguments[1]), k = std::atoll(arguments[2]), rows = std::atoll(arguments[3]);
  const std::vector<float> values = read(n * k), x = read(rows * k);
  kt::Hessian hessian(static_cast<int>(k));
  hessian.add({.x = x.data(), .type = kt::Real::kF32, .rows = rows});
  const kt::GptqFactor factor(hessian, {.damping = std::atof(arguments[4]),
                                        .act_order = std::atoi(arguments[5]) != 0,
                                        .scale_steps = std::atoi(arguments[6]),
                                        .least_scale = std::atof(arguments[7])});
  const kt::Matrix out = kt::gptq(format, values, n, k, factor);
  write(hessian.data(), kt::Hessian::bytes(hessian.dims()));
  write(out.codes.data(), out.codes.size());
  write(out.scales.data(), out.scales.size());
  write(out.mins.data(), out.mins.size());
  const double numbers[] = {factor.damping(), kt::output_error(values, out.view(), hessian)};
  write(numbers, sizeof(numbers));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::fputs("gptq_probe FORMAT n k rows DAMPING ACT_ORDER SCALE_STEPS LEAST_SCALE\n", stderr);
    return 2;
  }
  try {
    run(argv + 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
