// weights_probe: the readers and the writer of weights/ as a program, for tests in other languages.
//   weights_probe list PATH                         one line a tensor: name, type, shape, sha256 of its bytes, by tabs
//   weights_probe config PATH                       the config as read, one "key value" a line
//   weights_probe write FILE                        a safetensors file with a tensor of every dtype
//   weights_probe yaml FILE...                      for each a line: it as JSON, or "error: " and the message
//   weights_probe rewrite FILE                      YAML written again by to_yaml()
//   weights_probe experts PATH [TYPE]               dialect, sizes and layers of the routed experts
//   weights_probe dequant PATH LAYER EXPERT PROJ    one projection (gate, up, down) as f32 [n, k], raw
//   weights_probe bias PATH LAYER EXPERT PROJ       its bias as f32, raw; nothing where it has none
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <string>

#include "base/error.h"
#include "base/sha256.h"
#include "text/yaml.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"

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

void experts(const std::string& path, const std::string& type) {
  const kt::Checkpoint checkpoint(path);
  const auto source = kt::open_experts(checkpoint, kt::input_type_named(type));
  std::string layers;
  for (const int layer : source->layers()) layers += kt::text(" {}", layer);
  print(kt::text("dialect {}\nexperts {}\nhidden {}\ninter {}\nlayers{}\n", source->dialect(),
                 source->experts(), source->hidden(), source->inter(), layers));
}

void yaml(std::span<char*> paths) {
  for (const char* path : paths) {
    try {
      print(kt::read_yaml(path).dump() + "\n");
    } catch (const kt::Error& error) {
      print(kt::text("error: {}\n", error.what()));
    }
  }
}

kt::Projection projection_named(const std::string& name) {
  for (const kt::Projection projection : kt::kProjections)
    if (kt::name_of(projection) == name) return projection;
  kt::fail("projection '{}': expected gate, up or down", name);
}

void print_floats(const std::vector<float>& values) {
  if (std::fwrite(values.data(), sizeof(float), values.size(), stdout) != values.size())
    kt::fail("could not write {} values", values.size());
}

// arguments: PATH LAYER EXPERT PROJ
void dequant(char** arguments, bool bias) {
  const kt::Checkpoint checkpoint(arguments[0]);
  const auto source = kt::open_experts(checkpoint);
  const int layer = std::stoi(arguments[1]), expert = std::stoi(arguments[2]);
  const kt::Projection projection = projection_named(arguments[3]);
  if (bias) return print_floats(source->bias(layer, expert, projection).value_or(std::vector<float>{}));
  const auto matrix = source->at(layer, expert, projection);
  std::vector<float> values(static_cast<size_t>(matrix->n * matrix->k));
  matrix->values(0, matrix->n, values.data());
  print_floats(values);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc >= 3 ? argv[1] : "";
  try {
    if (verb == "experts" && argc <= 4) return experts(argv[2], argc == 4 ? argv[3] : "auto"), 0;
    if ((verb == "dequant" || verb == "bias") && argc == 6) return dequant(argv + 2, verb == "bias"), 0;
    if (verb == "yaml") return yaml({argv + 2, argv + argc}), 0;
    if (argc == 3 && verb == "rewrite") return print(kt::to_yaml(kt::read_yaml(argv[2]))), 0;
    if (argc == 3 && verb == "list") return list(argv[2]), 0;
    if (argc == 3 && verb == "config") return config(argv[2]), 0;
    if (argc == 3 && verb == "write") return write(argv[2]), 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weights_probe: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: weights_probe list|config|write|yaml|rewrite|experts|dequant|bias PATH ...\n");
  return 2;
}
