// Values as kt weights on disk, a layer at a time: the established byte order and rounding, no bf16 between.
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "hybrid/expert_values.h"
#include "weights/kt/kt_arrays.h"

namespace kt::inline hybrid {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRowsAtOnce = 16;  // a multiple of kKtRowGroup

// A folder that goes away with whatever is left in it.
struct FolderBeside {
  explicit FolderBeside(std::string folder) : path(std::move(folder)) {}
  ~FolderBeside() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  FolderBeside(const FolderBeside&) = delete;
  FolderBeside& operator=(const FolderBeside&) = delete;
  std::string path;
};

void make_folders(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail("{}: {}", path, error.message());
}

// kt_weights.json of the folder: written by the first layer, the same for all others.
void settle_facts(const std::string& folder, const KtModel& model) {
  const std::string file = text("{}/{}", folder, kKtFactsFile);
  std::error_code ignored;
  if (fs::exists(file, ignored)) {
    const KtModel there = parse_kt_facts(read_json(file), file);
    const auto describe = [](const KtModel& m) {
      return text("int{} of hidden {}, inter {} in {} parts", m.bits, m.hidden, m.inter, m.parts);
    };
    if (describe(there) != describe(model))
      fail("{}: holds {}; {} cannot be saved beside them", folder, describe(there), describe(model));
    return;
  }
  write_atomically(file, kt_facts(model));
}

// One projection of one expert: all its parts, then their files.
void save_projection(const StoredMatrix& matrix, const KtModel& model, KtName name,
                     const std::string& folder) {
  const bool down = name.projection == Projection::kDown;
  const KtShape shape = kt_part_shape(model, name);
  const int slabs = down ? 1 : model.parts, slices = down ? model.parts : 1;
  std::vector<float> values(static_cast<size_t>(kRowsAtOnce * matrix.k));
  std::vector<std::vector<std::byte>> packed(static_cast<size_t>(slices));
  std::vector<std::vector<float>> scales(static_cast<size_t>(slices));
  WeightError ignored;
  for (int slab = 0; slab < slabs; ++slab) {
    for (auto& bytes : packed) bytes.assign(shape.weight_bytes, std::byte{});
    for (auto& row_scales : scales) row_scales.assign(static_cast<size_t>(shape.n_pad), 0.0f);
    for (int64_t row = 0; row < shape.n; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, shape.n - row);
      matrix.values(slab * shape.n + row, count, values.data());
      for (int slice = 0; slice < slices; ++slice)
        kt_quantise_rows(shape, Rounding::kEstablished, row, count, values.data() + slice * shape.k, matrix.k,
                         packed[static_cast<size_t>(slice)], scales[static_cast<size_t>(slice)], ignored,
                         matrix.name);
    }
    for (int slice = 0; slice < slices; ++slice) {
      name.part = slab + slice;
      for (const bool scale : {false, true}) {
        name.scale = scale;
        const auto bytes = scale ? std::as_bytes(std::span(scales[static_cast<size_t>(slice)]))
                                 : std::span<const std::byte>(packed[static_cast<size_t>(slice)]);
        write_atomically(folder + "/" + kt_file_name(name, model.bits, bytes.size()), bytes);
      }
    }
  }
}

}  // namespace

void save_kt_layer(const ExpertSource& source, const KtLayer& to, Pool& pool) {
  const int layer = source.layers().front();
  const KtModel model{.bits = to.bits,
                      .hidden = source.hidden(),
                      .inter = source.inter(),
                      .parts = to.parts,
                      .rounding = "established",
                      .source = std::string(source.dialect())};
  const std::string name = text("_layer_{}", layer);
  const std::string saving = text("{}/.saving_{}_{}", to.folder, layer, ::getpid());
  for (const std::string& ours : {text("{}/{}", to.folder, name), saving}) refuse_link(ours);
  make_folders(to.folder);
  settle_facts(to.folder, model);
  const FolderBeside beside(saving);
  for (int part = 0; part < to.parts; ++part) make_folders(text("{}/{}/_numa_{}", beside.path, name, part));
  run_items(pool, int64_t{source.experts()} * 3, [&](int64_t item) {
    const KtName array{
        .layer = layer, .projection = kProjections[item % 3], .expert = static_cast<int>(item / 3)};
    save_projection(*source.at(layer, array.expert, array.projection), model, array, beside.path);
  });
  std::error_code error;
  fs::remove_all(text("{}/{}", to.folder, name), error);
  if (!error) fs::rename(text("{}/{}", beside.path, name), text("{}/{}", to.folder, name), error);
  if (error) fail("{}/{}: {}", to.folder, name, error.message());
}

}  // namespace kt::inline hybrid
