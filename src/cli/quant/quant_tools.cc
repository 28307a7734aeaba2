// kt quant merge | compare | dequant | dataset: what people do with converted weights, with sources that are
// quantised already and with texts for calibration.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/model_flags.h"
#include "cli/quant/quant.h"
#include "engine/calibration/dataset_files.h"
#include "engine/gguf_vocabulary.h"
#include "models/families.h"
#include "terminal/report.h"
#include "weights/checkpoint.h"
#include "weights/compare.h"
#include "weights/kt/kt_plan.h"
#include "weights/plans/dequant_plan.h"

namespace kt::inline cli {
namespace {

struct MergeFlags {
  std::string input, output, original;
  int max_tensors = 0;
  RunFlags run;
};

struct CompareFlags {
  std::string a, b;
  double tolerance = 0;
  bool json = false;
};

struct DequantFlags {
  std::string input, output, config;
  std::vector<std::string> files;
  RunFlags run;
};

std::string_view kind_name(TensorDifference::Kind kind) {
  switch (kind) {
    case TensorDifference::Kind::kOnlyA:
      return "only in A";
    case TensorDifference::Kind::kOnlyB:
      return "only in B";
    case TensorDifference::Kind::kShape:
      return "shapes differ";
    case TensorDifference::Kind::kType:
      return "types differ";
    case TensorDifference::Kind::kValues:
      return "values differ";
  }
  return "";
}

// As short as it is told apart from others: 1e-06 is not 0.
std::string difference_text(double value) {
  if (!std::isfinite(value)) return "infinite";
  char number[32];
  std::snprintf(number, sizeof number, "%.3g", value);
  return number;
}

std::string largest_text(const TensorDifference& difference) {
  if (difference.elements == 0) return "";
  return difference.floats ? difference_text(difference.largest) : "-";
}

// What differs, of floats by how much at most, and of anything else in how many bytes.
std::string summary_text(const Comparison& found) {
  bool floats = found.largest > 0 || found.same();
  int64_t bytes = 0;
  for (const TensorDifference& d : found.differences) {
    floats |= d.floats;
    if (!d.floats) bytes += d.differing;
  }
  std::string out = floats ? "; largest difference " + difference_text(found.largest) : "";
  if (bytes > 0) out += text("; {} that are no floats differ", counted(bytes, "byte"));
  return out;
}

void print_comparison(const Comparison& found, double tolerance) {
  constexpr size_t kMostRows = 50;
  Table table({"tensor", "", "A", "B", "differing", "largest"}, 4);
  for (size_t i = 0; i < std::min(found.differences.size(), kMostRows); ++i) {
    const TensorDifference& d = found.differences[i];
    const bool compared = d.elements > 0;
    table.add({d.name, std::string(kind_name(d.kind)), d.a, d.b,
               compared ? text("{} of {}{}", d.differing, d.elements, d.floats ? "" : " bytes") : "",
               largest_text(d)});
  }
  if (!found.same()) std::printf("%s", table.str().c_str());
  if (found.differences.size() > kMostRows)
    std::printf("and %zu more\n", found.differences.size() - kMostRows);
  std::printf("%s%lld of %lld tensors equal within %s (B has %lld)%s\n", found.same() ? "" : "\n",
              static_cast<long long>(found.equal), static_cast<long long>(found.tensors_a),
              difference_text(tolerance).c_str(), static_cast<long long>(found.tensors_b),
              summary_text(found).c_str());
}

nlohmann::ordered_json comparison_json(const Comparison& found) {
  auto differences = nlohmann::ordered_json::array();
  for (const TensorDifference& d : found.differences)
    differences.push_back({{"tensor", d.name},
                           {"kind", kind_name(d.kind)},
                           {"a", d.a},
                           {"b", d.b},
                           {"elements", d.elements},
                           {"differing", d.differing},
                           {"largest", d.floats ? nlohmann::ordered_json(d.largest) : nullptr}});
  return {{"same", found.same()},         {"tensors_a", found.tensors_a},
          {"tensors_b", found.tensors_b}, {"equal", found.equal},
          {"largest", found.largest},     {"bytes_compared", found.bytes_compared},
          {"differences", differences}};
}

void run_compare(const CompareFlags& flags) {
  const Comparison found = compare_weights(flags.a, flags.b, flags.tolerance);
  if (flags.json)
    std::printf("%s\n", comparison_json(found).dump(2).c_str());
  else
    print_comparison(found, flags.tolerance);
  std::fflush(stdout);
  if (!found.same()) fail("{} and {} differ in {} tensors", flags.a, flags.b, found.differences.size());
}

}  // namespace

void add_quant_merge(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("merge", "Join a folder of .kt files into safetensors");
  const auto flags = std::make_shared<MergeFlags>();
  verb->add_option("INPUT,-i,--input-path", flags->input, "Folder with _layer_* folders")->required();
  verb->add_option("-o,--output", flags->output, "Folder to write")->required();
  verb->add_option("-r,--original-path", flags->original,
                   "The original checkpoint, for everything that is not an expert");
  verb->add_option("--max-tensors", flags->max_tensors,
                   "Tensors in one file at most; default: one layer a file")
      ->check(positive());
  flags->run.add_to(*verb);
  verb->footer("Example:\n  kt quant merge ./out-kt -o ./out -r ./Qwen3-30B-A3B");
  verb->callback([&run, flags] {
    run.action = [flags] {
      convert_and_report(plan_merge({.folder = flags->input,
                                     .original = flags->original,
                                     .output = flags->output,
                                     .max_tensors = flags->max_tensors,
                                     .tool = "kt " + version(),
                                     .families = gguf_families()}),
                         flags->run);
    };
  });
}

void add_quant_compare(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("compare", "Compare the tensors of two checkpoints");
  const auto flags = std::make_shared<CompareFlags>();
  verb->add_option("A,--path1", flags->a, "A folder or file")->required();
  verb->add_option("B,--path2", flags->b, "Another")->required();
  verb->add_option("--tolerance", flags->tolerance, "Largest difference that counts as equal")
      ->capture_default_str();
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Exit code 0 when they agree, 2 when not.\n\nExample:\n  kt quant compare ./a ./b --tolerance 1e-6");
  verb->callback([&run, flags] { run.action = [flags] { run_compare(*flags); }; });
}

void add_quant_dequant(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("dequant", "Turn an fp8, int4 or GGUF checkpoint into bf16");
  const auto flags = std::make_shared<DequantFlags>();
  CLI::Option* const input =
      verb->add_option("MODEL,--model-dir,--input-fp8-hf-path", flags->input, "The quantised checkpoint")
          ->required();
  take_model(*verb, run, input, {.path = &flags->input, .use = [] { return ModelUse::kConvert; }});
  verb->add_option("-o,--output,--output-dir,--output-bf16-hf-path", flags->output, "Folder to write")
      ->required();
  verb->add_option("--files", flags->files, "Only these files of the checkpoint")->delimiter(',');
  verb->add_option("--config-path", flags->config, "config.json to use instead of the checkpoint's own");
  flags->run.add_to(*verb);
  verb->footer("Example:\n  kt quant dequant ./Kimi-K2-Instruct -o ./Kimi-K2-bf16");
  verb->callback([&run, flags] {
    run.action = [flags] {
      const Checkpoint checkpoint(flags->input, gguf_families());
      ConversionPlan plan = plan_dequant(checkpoint, {.output = flags->output,
                                                      .files = flags->files,
                                                      .config_path = flags->config,
                                                      .version = version()});
      if (checkpoint.is_gguf())
        for (SideFile& file : gguf_tokenizer_files(checkpoint)) plan.side_files.push_back(std::move(file));
      convert_and_report(plan, flags->run);
    };
  });
}

void add_quant_dataset(CLI::App& quant, Invocation& run) {
  CLI::App* verb =
      quant.add_subcommand("dataset", "List the files that a dataset for calibration consists of");
  const auto request = std::make_shared<DatasetRequest>(DatasetRequest{.option = "NAME", .parquet = true});
  verb->add_option("NAME", request->dataset, "A file, or a name in the hub cache: org/name or name")
      ->required();
  verb->add_option("--split", request->split, "Of a name: the part whose files are meant");
  const auto download = std::make_shared<bool>(false);
  verb->add_flag("--download", *download, "Download a dataset of the hub that is not on this disk");
  verb->footer("Example:\n  kt quant dataset HuggingFaceH4/ultrachat_200k --split train_sft");
  verb->callback([&run, request, download] {
    run.action = [request, download] {
      fetch_dataset(request->dataset, {.agreed = *download});
      for (const std::string& path : find_dataset(*request).paths) std::printf("%s\n", path.c_str());
    };
  });
}

}  // namespace kt::inline cli
