// weights_probe: the readers and the writer of weights/ as a program, for tests in other languages.
//   weights_probe list PATH   one line a tensor: name, type, shape, sha256 of its bytes, separated by tabs
//   weights_probe config PATH the config as read, one "key value" a line
//   weights_probe write FILE  a safetensors file with a tensor of every dtype
#include <cstdio>
#include <exception>
#include <random>
#include <string>

#include "base/error.h"
#include "base/sha256.h"
#include "weights/checkpoint.h"

namespace {

void print(const std::string& line) { std::fwrite(line.data(), 1, line.size(), stdout); }

std::string digest(std::span<const std::byte> bytes) {
  kt::Sha256 sha;
  sha.add(bytes);
  return sha.hex();
}

void list(const std::string& path) {
  const kt::Checkpoint checkpoint(path);
  for (const kt::Tensor& t : checkpoint.tensors()) {
    const std::string type =
        t.dtype == kt::Dtype::kGguf ? kt::gguf_type_text(t.gguf_type) : std::string(kt::name_of(t.dtype));
    print(kt::text("{}\t{}\t{}\t{}\n", t.name, type, kt::shape_text(t.shape), digest(t.bytes)));
  }
  checkpoint.check_unchanged();
}

void config(const std::string& path) {
  const kt::Checkpoint checkpoint(path);
  const kt::ModelConfig& c = checkpoint.config();
  print(kt::text("model_type {}\nlayers {}\nhidden {}\ninter {}\nexperts {}\ntop_k {}\ndense_first {}\n",
                 c.model_type, c.layers, c.hidden, c.inter, c.experts, c.top_k, c.dense_first));
  print(kt::text("mtp_layers {}\nquantization {}\n", c.mtp_layers, c.quantization.method));
}

void write(const std::string& path) {
  std::vector<kt::TensorSpec> specs;
  for (int i = 0; i < static_cast<int>(kt::Dtype::kGguf); ++i) {
    const auto dtype = static_cast<kt::Dtype>(i);
    specs.push_back({kt::text("layer.{}.\"{}\"", i, kt::name_of(dtype)), dtype, {i % 3 + 1, 2 * i + 2}});
  }
  specs.push_back({"scalar", kt::Dtype::kF32, {}});
  specs.push_back({"empty", kt::Dtype::kI64, {0, 5}});
  kt::SafetensorsWriter writer(path, specs, {{"format", "pt"}, {"note", "a \"quoted\"\nline"}});
  std::mt19937 random(7);
  // Last tensor first, in two pieces.
  for (size_t i = specs.size(); i-- > 0;) {
    std::vector<std::byte> bytes(kt::byte_count(specs[i]));
    for (std::byte& b : bytes)
      b = static_cast<std::byte>(specs[i].dtype == kt::Dtype::kBool ? random() & 1 : random());
    const size_t half = bytes.size() / 2;
    writer.write(i, half, std::span(bytes).subspan(half));
    writer.write(i, 0, std::span(bytes).first(half));
  }
  print(writer.digest() + "\n");
  writer.commit();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc == 3 ? argv[1] : "";
  try {
    if (verb == "list") return list(argv[2]), 0;
    if (verb == "config") return config(argv[2]), 0;
    if (verb == "write") return write(argv[2]), 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weights_probe: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: weights_probe list|config|write PATH\n");
  return 2;
}
