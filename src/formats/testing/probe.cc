// formats_probe: the formats floor between two pipes, for tests in other languages.
//   formats_probe values   TYPE n k    GGUF blocks in, f32 out
//   formats_probe again    TYPE n k    the same after encoding the decoded matrix and decoding it once more
//   formats_probe blocks   TYPE n k    f32 in, quantised GGUF blocks out
//   formats_probe quantise FORMAT n k  f32 in; codes, scales, mins, supers and super_mins out, one after
//   another
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "base/error.h"
#include "formats/gguf_blocks.h"
#include "formats/matrix.h"

namespace {

std::vector<std::byte> read_all() {
  std::vector<std::byte> out;
  std::byte chunk[65536];
  while (const size_t got = std::fread(chunk, 1, sizeof chunk, stdin))
    out.insert(out.end(), chunk, chunk + got);
  return out;
}

void write_all(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, stdout) != bytes) kt::fail("could not write {} bytes", bytes);
}

std::vector<float> as_floats(const std::vector<std::byte>& bytes) {
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
  return out;
}

void write_values(const kt::Matrix& matrix) {
  std::vector<float> values(static_cast<size_t>(matrix.n * matrix.k));
  kt::dequantise(matrix.view(), values);
  write_all(values.data(), values.size() * sizeof(float));
}

void run(const std::string& verb, const std::string& name, int64_t n, int64_t k) {
  const std::vector<std::byte> input = read_all();
  if (verb == "quantise") {
    const kt::Matrix matrix = kt::quantise(kt::format_named(name), as_floats(input), n, k);
    for (const auto* part :
         {&matrix.codes, &matrix.scales, &matrix.mins, &matrix.supers, &matrix.super_mins}) {
      write_all(part->data(), part->size());
    }
    return;
  }
  const auto type = kt::gguf_type(std::string_view(name));
  if (!type) kt::fail("unknown GGUF type {}", name);
  if (verb == "blocks") {
    const kt::Matrix matrix = kt::quantise(kt::gguf_format(*type), as_floats(input), n, k);
    const std::vector<std::byte> blocks = kt::gguf_from_matrix(*type, matrix.view());
    return write_all(blocks.data(), blocks.size());
  }
  kt::Matrix matrix = kt::matrix_from_gguf(*type, input, n, k);
  if (verb == "again") {
    const std::vector<std::byte> blocks = kt::gguf_from_matrix(*type, matrix.view());
    matrix = kt::matrix_from_gguf(*type, blocks, n, k);
  } else if (verb != "values") {
    kt::fail("unknown verb {}", verb);
  }
  write_values(matrix);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: formats_probe values|again|blocks|quantise NAME n k\n");
    return 2;
  }
  try {
    run(argv[1], argv[2], std::atoll(argv[3]), std::atoll(argv[4]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "formats_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
