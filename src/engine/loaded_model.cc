#include "engine/loaded_model.h"

#include "engine/transformer_steps.h"

namespace kt::inline engine {

LoadedModel::LoadedModel(DescribedModel described, std::string dialect, std::vector<std::string> adapters,
                         std::shared_ptr<Pool> pool, std::vector<std::shared_ptr<const Gpu>> gpus,
                         std::unique_ptr<Transformer> transformer, int shared_tokens, double seconds)
    : DescribedModel(std::move(described)),
      dialect_(std::move(dialect)),
      adapters_(std::move(adapters)),
      pool_(std::move(pool)),
      gpus_(std::move(gpus)),
      transformer_(std::move(transformer)),
      shared_tokens_(shared_tokens),
      load_seconds_(seconds) {}

LoadedModel::LoadedModel(LoadedModel&&) noexcept = default;
LoadedModel::~LoadedModel() = default;

std::unique_ptr<Runner> LoadedModel::make_runner(int pages, const MemoryRequest& states) {
  const int slots = transformer_->state_slots(pages, states.sequences, states.snapshots);
  return std::make_unique<TransformerSteps>(*transformer_, pool_, pages, slots);
}

int LoadedModel::max_tokens() const { return transformer_->max_tokens(); }
double LoadedModel::stored_bytes() const { return transformer_->stored_bytes(); }

}  // namespace kt::inline engine
