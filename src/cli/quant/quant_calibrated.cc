#include "cli/quant/quant_calibrated.h"

#include <unistd.h>
#include <exception>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/sha256.h"
#include "bench/coverage_plot.h"
#include "cli/quant/conversion_report.h"
#include "cli/registry/fetch_model.h"
#include "engine/calibration/calibration.h"
#include "engine/calibration/calibration_totals.h"
#include "engine/folder_tokenizer.h"
#include "kernels/table.h"
#include "models/families.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "weights/plans/source_identity.h"

namespace kt::inline cli {
namespace {

constexpr const char *kReport = "kt_calibration.json", *kPlot = "kt_calibration.svg";

// Experts of an architecture that cannot run can still be rounded to nearest.
void refuse_unknown_layers(const Checkpoint& checkpoint) {
  try {
    describe_model(checkpoint);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
    std::set<std::string> types;
    const Json& config = checkpoint.config_json();
    if (const auto list = config.find("layer_types"); list != config.end() && list->is_array())
      for (const Json& type : *list)
        if (type.is_string() && type != "full_attention" && type != "sliding_attention")
          types.insert(type.get<std::string>());
    if (const auto every = config.find("full_attention_interval");
        !config.contains("layer_types") && every != config.end() && every->is_number_integer() && *every > 1)
      types.insert("linear_attention");
    if (types.empty()) types.insert("those of model_type " + checkpoint.config().model_type);
    std::string missing;
    for (const std::string& type : types) missing += (missing.empty() ? "" : ", ") + type;
    fail_as(ErrorKind::kUnsupported,
            tr("GPTQ has to run the model: {}; missing layers: {}; --method RTN works without"), error.what(),
            missing);
  }
}

std::function<void(const CalibrationProgress&)> show_calibration(bool quiet) {
  if (quiet) return {};
  const auto line = std::make_shared<StatusLine>();
  const auto last = std::make_shared<double>(0);
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  return [=](const CalibrationProgress& at) {
    const double part = at.experts > 0 ? static_cast<double>(at.experts_done) / at.experts : 0;
    const double done = at.layers_done - at.layers_kept + part, all = at.layers - at.layers_kept;
    const std::string progress = text("calibrating layer {} ({} of {}): {} of {} experts  ETA {}", at.layer,
                                      at.layers_done + 1, at.layers, at.experts_done, at.experts,
                                      done > 0 ? duration(at.seconds * (all - done) / done) : "?");
    if (terminal) return line->show(progress);
    if (at.seconds - *last < 5) return;
    *last = at.seconds;
    std::fprintf(stderr, "%s\n", progress.c_str());
  };
}

// Matrices of attention, dense MLPs and shared experts, a line for each kind over all layers.
void print_linears(const CalibrationReport& report) {
  struct Kind {
    int64_t matrices = 0, calibrated = 0;
    double signal = 0, rtn_error = 0, error = 0;
  };
  std::map<std::string, Kind> kinds;
  for (const LayerFigures& layer : report.layers)
    for (const LinearFigures& linear : layer.linears) {
      Kind& kind = kinds[linear.module.substr(linear.module.rfind('.') + 1)];
      ++kind.matrices;
      kind.calibrated += linear.figures.by == RoundedBy::kGptq ? 1 : 0;
      kind.signal += linear.figures.signal;
      kind.rtn_error += linear.figures.rtn_error;
      kind.error += linear.figures.error;
    }
  if (kinds.empty()) return;
  Table table({"in all layers", "count", "calibrated", "to nearest", "output error RTN", "chosen", "ratio"},
              0);
  for (const auto& [name, kind] : kinds) {
    const auto relative = [&](double error) {
      return kind.signal > 0 ? percent(std::sqrt(error / kind.signal)) : std::string("-");
    };
    table.add({name, std::to_string(kind.matrices), std::to_string(kind.calibrated),
               std::to_string(kind.matrices - kind.calibrated), relative(kind.rtn_error),
               relative(kind.error), kind.rtn_error > 0 ? fixed(kind.error / kind.rtn_error, 3) : "-"});
  }
  std::printf("%s\n", table.str().c_str());
}

// What was read: the dataset as it was named, and its files within a snapshot of the hub.
Json dataset_json(const TextRequest& request, const DatasetFiles& files) {
  Json out = {{"name", request.dataset}, {"files", files.names}};
  if (files.revision.empty()) return out;
  out["revision"] = files.revision;
  if (!request.split.empty()) out["split"] = request.split;
  return out;
}

std::string dataset_text(const TextRequest& request, const DatasetFiles& files) {
  if (files.revision.empty()) return request.dataset;
  const size_t more = files.names.size() - 1;
  return text("{}, {}{}", request.dataset, files.names.front(), more > 0 ? text(" and {} more", more) : "");
}

void print_calibration(const CalibrationReport& report, const CalibrationText& text_of,
                       const TextRequest& request) {
  if (report.layers.empty()) return;
  std::printf("%s: %s of %lld (%lld cut at %d tokens, %lld passed over: too short)\n",
              dataset_text(request, text_of.files).c_str(),
              counted(static_cast<int64_t>(text_of.samples.size()), "sample").c_str(),
              static_cast<long long>(text_of.found), static_cast<long long>(text_of.cut), text_of.max_length,
              static_cast<long long>(text_of.too_short));
  std::printf("calibrated on %lld tokens, %lld more held out%s\n\n",
              static_cast<long long>(report.tokens - report.held_out),
              static_cast<long long>(report.held_out), report.on_disk ? "; activations on disk" : "");
  Table table({"layer", "tokens an expert, least", "median", "most", "calibrated", "to nearest", "kept",
               "output error RTN", "chosen", "ratio"},
              0);
  bool experts = false;
  for (const LayerFigures& layer : report.layers) {
    if (layer.experts.empty()) continue;
    experts = true;
    std::vector<int64_t> tokens;
    int64_t calibrated = 0, kept = 0;
    for (const ExpertFigures& e : layer.experts) {
      tokens.push_back(e.tokens);
      calibrated += e.by == RoundedBy::kGptq ? 1 : 0;
      kept += e.by == RoundedBy::kKept ? 1 : 0;
    }
    std::sort(tokens.begin(), tokens.end());
    const ExpertFigures total = layer.total();
    const auto relative = [&](double error) {
      return total.signal > 0 ? percent(std::sqrt(error / total.signal)) : std::string("-");
    };
    table.add({std::to_string(layer.layer), std::to_string(tokens.front()),
               std::to_string(tokens[tokens.size() / 2]), std::to_string(tokens.back()),
               std::to_string(calibrated),
               std::to_string(static_cast<int64_t>(tokens.size()) - calibrated - kept), std::to_string(kept),
               relative(total.rtn_error), relative(total.error),
               total.rtn_error > 0 ? fixed(total.error / total.rtn_error, 3) : "-"});
  }
  if (experts) std::printf("%s\n", table.str().c_str());
  print_linears(report);
  std::printf("errors of outputs on held-out tokens, root mean square over their size; ratio of squares\n\n");
}

std::string coverage_plot(const CalibrationReport& report) {
  std::vector<CoverageRow> rows;
  for (const LayerFigures& layer : report.layers) {
    if (layer.experts.empty()) continue;
    CoverageRow& row = rows.emplace_back(CoverageRow{.layer = layer.layer, .cells = {}});
    for (const ExpertFigures& e : layer.experts)
      row.cells.push_back(
          {.tokens = e.tokens, .nearest = e.by != RoundedBy::kGptq && e.by != RoundedBy::kKept});
  }
  return coverage_svg("Tokens each expert was calibrated with", rows);
}

// What calibration depends on beside the weights, and what to do where other kernels began.
void add_resume_checks(ConversionPlan& plan, const Checkpoint& checkpoint) {
  if (!checkpoint.is_gguf()) {
    const auto add = [&](const char* name) {
      plan.settings["contents"][name] = file_digest(checkpoint.folder() + "/" + name);
    };
    for (const char* name :
         {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"})
      add(name);
    if (const std::optional<std::string> tokenizer = tokenizer_file_of(checkpoint.folder()))
      if (const auto name = std::filesystem::path(*tokenizer).filename(); name != "tokenizer.json")
        add(name.c_str());
  }
  plan.resume_hint = [](const Json& before) {
    const auto method = before.find("method");
    const std::string was =
        method != before.end() && method->is_object() ? method->value("kernels", "") : std::string();
    return was.empty() || was == best_kernels().name ? "" : text("KT_ISA={} goes on where it was", was);
  };
}

CalibrationOptions options_of(const CalibrationFlags& flags, const RunFlags& run) {
  CalibrationOptions out;
  out.rounding.gptq.damping = flags.dampening;
  out.rounding.gptq.act_order = flags.actorder == "static";
  out.threads = fitted({.threads = run.threads}).threads;
  if (run.memory() > 0) out.max_memory = run.memory();
  out.progress = show_calibration(run.json);
  return out;
}

}  // namespace

std::vector<CLI::Option*> CalibrationFlags::add_to(CLI::App& verb) {
  CLI::Option* const measured =
      verb.add_option("--perplexity", perplexity.file,
                      "GPTQ: afterwards measure perplexity on this text, .txt or .jsonl, and KL from the "
                      "original, of the "
                      "original, of rounding to nearest and of what was written")
          ->check([](const std::string& value) { return value.empty() ? "expected a file" : std::string(); });
  return {
      verb.add_option("--num-calibration-samples", text.samples, "Samples of the text to calibrate with")
          ->check(positive())
          ->capture_default_str(),
      verb.add_option("--max-sequence-length", text.max_length, "Tokens of a sample; longer ones are cut")
          ->check(positive())
          ->capture_default_str(),
      verb.add_option(
              "--dampening-frac", dampening,
              "Added to the diagonal of the moments, as a part of its mean; raised where that is not enough")
          ->check(within(0, 10))
          ->capture_default_str(),
      verb.add_option(
              "--actorder,--activation-order", actorder,
              "static: columns whose inputs are largest are rounded first, groups stay where they are; "
              "none: from left to right")
          ->check(CLI::IsMember({"static", "none"}))
          ->capture_default_str(),
      verb.add_option("--seed,--random-seed", text.seed, "Chooses samples where the text has more")
          ->check([](const std::string& value) -> std::string {
            const bool digits = value.find_first_not_of("0123456789") == std::string::npos;
            return digits && !value.empty() && value.size() < 19
                       ? ""
                       : "expected a whole number from 0 to 999999999999999999, got '" + value + "'";
          })
          ->capture_default_str(),
      measured,
      verb.add_option("--perplexity-tokens", perplexity.tokens, "Tokens of that text to predict at most")
          ->check(positive())
          ->needs(measured)
          ->capture_default_str()};
}

void convert_calibrated(const Checkpoint& checkpoint, const ExpertSource* source,
                        CompressedPlanOptions options, const CalibrationFlags& flags, const RunFlags& run) {
  refuse_unknown_layers(checkpoint);
  fetch_dataset(flags.text.dataset, {.agreed = flags.download});
  const OpenedModel model(checkpoint.path());
  CalibrationText samples = read_calibration_text(flags.text, model);
  const CalibrationText facts = samples;
  std::optional<QuantPerplexity> perplexity;
  if (!flags.perplexity.file.empty())
    perplexity.emplace(flags.perplexity, model, checkpoint, source, options, run);
  const CompressedTargets targets(checkpoint, source, options);
  Calibration calibration(checkpoint, source, model.spec(), std::move(samples), targets,
                          options_of(flags, run));
  options.rounded = [&](const std::string& module) { return calibration.rounded(module); };
  options.method = {{"name", "gptq"},
                    {"dampening", flags.dampening},
                    {"actorder", flags.actorder},
                    {"max_sequence_length", facts.max_length},  // how rows are summed together
                    {"text", facts.digest},
                    {"kernels", best_kernels().name}};  // instruction sets differ in the last bits of a sum
  ConversionPlan plan = plan_model(checkpoint, source, options);
  add_resume_checks(plan, checkpoint);
  const std::string work = conversion_work_folder(options.output);
  for (const char* name : {kReport, kPlot}) plan.side_files.push_back({name, "", work + "/" + name});
  // Layers as they were rounded, until the last file is written; activations where memory is short.
  for (const ShardPlan& shard : plan.shards)
    for (const TensorSpec& tensor : shard.tensors)
      if (tensor.name.ends_with(".weight_packed") || tensor.name.ends_with(".weight_scale"))
        plan.prepare_bytes += byte_count(tensor);
  if (calibration.report().on_disk)
    plan.prepare_bytes +=
        static_cast<uint64_t>(facts.tokens) * static_cast<uint64_t>(model.spec().hidden) * 6;
  plan.prepare = [&](const std::string& folder) {
    Sha256 settings;
    const std::string json = plan.settings.dump();
    settings.add(std::as_bytes(std::span(json)));
    calibration.run(folder, settings.hex());
    Json report = calibration.report().json();
    report["dataset"] = dataset_json(flags.text, facts.files);
    report["samples"] = facts.samples.size();
    report["samples_found"] = facts.found;
    report["samples_cut"] = facts.cut;
    report["samples_too_short"] = facts.too_short;
    report["max_length"] = facts.max_length;
    report["settings"] = options.method;
    report["total"] = calibration_totals(report, flags.dampening);
    write_atomically(folder + "/" + kReport, report.dump(1));
    write_atomically(folder + "/" + kPlot, coverage_plot(calibration.report()));
    if (run.json) return;
    print_calibration(calibration.report(), facts, flags.text);
    std::printf("%s\n\n", calibration_summary(report.at("total")).c_str());
  };
  const ConversionResult result = convert(plan, run);
  const std::string path = options.output + "/" + kReport;
  Json report = read_json(path, {.bytes = size_t{1} << 30});
  if (!run.json) print_conversion(plan, result);
  // What was converted is there, and said, whatever becomes of measuring it.
  std::exception_ptr failed;
  if (perplexity) try {
      report["perplexity"] = perplexity->measure();
      replace_side_file(options.output, kReport, report.dump(1));
    } catch (...) {
      failed = std::current_exception();
    }
  if (run.json) {
    nlohmann::ordered_json out = conversion_json(plan, result);
    out["calibration"] = report;
    std::printf("%s\n", out.dump(2).c_str());
  } else if (perplexity && !failed) {
    std::printf("\n");
    print_perplexities(report.at("perplexity"), flags.perplexity.file);
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace kt::inline cli
