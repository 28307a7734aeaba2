#include "hub/hub_client.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "hub/cache.h"
#include "text/shown.h"

namespace kt::inline hub {
namespace {

constexpr int kTries = 4, kMostRedirects = 5, kMostPages = 2000;
constexpr size_t kLargestListing = size_t{100} << 20, kMostFiles = 1'000'000;

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool is_set(const char* name) {
  const std::string value = setting(name);
  return value == "1" || value == "true" || value == "TRUE" || value == "True" || value == "YES" ||
         value == "yes" || value == "ON" || value == "on";
}

std::string stripped(std::string string) {
  string.erase(string.find_last_not_of(" \r\n\t") + 1);
  string.erase(0, string.find_first_not_of(" \r\n\t"));
  return string;
}

// What may stand in a header; anything else would be a second one.
std::string checked_token(const std::string& token, std::string_view where) {
  const auto plain = [](char c) { return c > 0x20 && c < 0x7f; };
  if (!std::ranges::all_of(token, plain)) fail("{}: the token has characters that no token has", where);
  return token;
}

std::string hub_token() {
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
    if (const std::string token = stripped(setting(name)); !token.empty()) return checked_token(token, name);
  if (is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN")) return "";
  const std::string given = setting("HF_TOKEN_PATH"),
                    path = given.empty() ? hub_home_folder() + "/token" : given;
  return checked_token(stripped(read_small_file(path).value_or("")), path);
}

std::string endpoint_of(HubSource source) {
  const bool hub = source == HubSource::kHuggingFace;
  const char* const name = hub ? "HF_ENDPOINT" : "MODELSCOPE_ENDPOINT";
  std::string out = setting(name);
  if (out.empty() && !hub && !setting("MODELSCOPE_DOMAIN").empty())
    out = "https://" + setting("MODELSCOPE_DOMAIN");
  if (out.empty()) return hub ? "https://huggingface.co" : "https://modelscope.cn";
  while (out.ends_with('/')) out.pop_back();
  if (origin_of(out).empty())
    fail("{} is '{}': expected an address such as https://huggingface.co", name, shown(out));
  return out;
}

// The address of rel="next" in a Link field.
std::string next_of(const std::string& link) {
  const size_t rel = link.find("rel=\"next\"");
  if (rel == link.npos) return "";
  const size_t end = link.rfind('>', rel), start = link.rfind('<', rel);
  return start == link.npos || end == link.npos || end < start ? "" : link.substr(start + 1, end - start - 1);
}

}  // namespace

bool is_passing(int status) { return status == 408 || status == 429 || status >= 500; }

std::chrono::milliseconds pause_after(int failures, const WebHead& head) {
  const std::string asked = head.field("retry-after");
  if (!asked.empty() && asked.size() < 6 && asked.find_first_not_of("0123456789") == asked.npos)
    return std::chrono::seconds(std::min(300, std::stoi(asked)));
  return std::chrono::milliseconds(std::min(8000, 200 << std::min(failures, 6)));
}

HubClient::HubClient(HubSource source) : source_(source), endpoint_(endpoint_of(source)) {
  if (is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"))
    fail("HF_HUB_OFFLINE is set: nothing is asked of a hub; unset it to download");
  token_ = source == HubSource::kHuggingFace
               ? hub_token()
               : checked_token(stripped(setting("MODELSCOPE_API_TOKEN")), "MODELSCOPE_API_TOKEN");
}

std::vector<std::string> HubClient::fields_for(const std::string& url) const {
  const std::string origin = origin_of(url);
  if (token_.empty() || origin.empty() || origin != origin_of(endpoint_)) return {};
  return {"Authorization: Bearer " + token_};
}

void HubClient::check_redirect(const std::string& from, const std::string& to) const {
  const std::string origin = origin_of(to);
  if (origin.empty()) fail("{}: leads to '{}', which is no http address", origin_of(from), shown(to));
  if (from.starts_with("https:") && !to.starts_with("https:"))
    fail("{}: leads from https to {}, which anyone on the way can change", origin_of(from), origin);
}

std::string HubClient::page_of(const RepoId& repo) const {
  const bool data = repo.kind == RepoKind::kDataset;
  if (source_ == HubSource::kModelScope) return endpoint_ + (data ? "/datasets/" : "/models/") + repo.str();
  return endpoint_ + (data ? "/datasets/" : "/") + repo.str();
}

std::string HubClient::file_url(const RepoListing& listing, const std::string& path) const {
  const bool data = listing.repo.kind == RepoKind::kDataset;
  if (source_ == HubSource::kModelScope)
    return text("{}/api/v1/{}/{}/repo?Revision={}&FilePath={}", endpoint_, data ? "datasets" : "models",
                listing.repo.str(), escaped(listing.commit), escaped(path));
  return text("{}/{}{}/resolve/{}/{}", endpoint_, data ? "datasets/" : "", listing.repo.str(), listing.commit,
              escaped(path));
}

void HubClient::refuse(const WebHead& head, const RepoId& repo, const std::string& revision,
                       const std::string& what) const {
  const std::string code = head.field("x-error-code"), name = repo.str();
  const char* const variable = source_ == HubSource::kHuggingFace ? "HF_TOKEN" : "MODELSCOPE_API_TOKEN";
  const bool gated = code == "GatedRepo" || (head.status == 403 && code.empty());
  if (gated && token_.empty())
    fail("{} is gated: agree to its terms at {}, then set {} to a token of your account", name, page_of(repo),
         variable);
  if (gated)
    fail("{} is gated, and the account of your token has no access yet: ask for it at {}", name,
         page_of(repo));
  if (head.status == 401 && code != "RepoNotFound" && !token_.empty())
    fail("{}: {} refused the token ({}); make a new one, or unset {} for what is public", name, endpoint_,
         head.status, variable);
  if (code == "RevisionNotFound")
    fail("{}: there is no revision '{}' at {}", name, shown(revision), page_of(repo));
  if (code == "EntryNotFound") fail("{}: {} is not there any more", name, shown(what));
  if (head.status == 404 || head.status == 401)
    fail("{}: no such repository at {}{}", name, endpoint_,
         token_.empty() ? text("; check the name, or set {} if it is private", variable)
                        : ", or your token may not see it; check the name");
  fail("{}: {} answered {} to {}", name, endpoint_, head.status, shown(what));
}

HubClient::Got HubClient::get(const std::string& first, const RepoId& repo, const std::string& revision,
                              size_t most) {
  std::string url = first;
  int redirects = 0;
  for (int failures = 0;;) {
    Got out;
    const auto sink = [&](const WebHead&, std::span<const std::byte> bytes) {
      if (out.body.size() + bytes.size() > most) return false;
      out.body.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return true;
    };
    web_.start({.url = url, .fields = fields_for(url), .range = {}, .sink = sink});
    std::vector<WebAnswer> answers;
    while (answers.empty()) answers = web_.wait(std::chrono::milliseconds(1000));
    const WebAnswer& answer = answers.front();
    if (answer.refused)
      fail("{}: the answer to {} is larger than {}", repo.str(), shown(url), human_bytes(most));
    if (answer.problem.empty() && !answer.redirect.empty() && answer.head.status / 100 == 3) {
      if (++redirects > kMostRedirects)
        fail("{}: {} redirects in a row at {}", repo.str(), redirects, endpoint_);
      check_redirect(url, answer.redirect);
      url = answer.redirect;
      continue;
    }
    if (answer.problem.empty() && answer.head.status == 200) {
      out.next = next_of(answer.head.field("link"));
      return out;
    }
    if (answer.problem.empty() && !is_passing(answer.head.status)) refuse(answer.head, repo, revision, first);
    if (++failures == kTries || answer.hopeless)
      fail("{}: {} cannot be asked: {}", repo.str(), endpoint_,
           answer.problem.empty() ? text("it answered {}", answer.head.status) : answer.problem);
    std::this_thread::sleep_for(pause_after(failures, answer.head));
  }
}

RepoListing HubClient::list(const RepoId& repo, const std::string& revision) {
  check_revision(revision);
  RepoListing out{.repo = repo, .revision = revision, .commit = {}, .files = {}};
  const char* const kind = repo.kind == RepoKind::kDataset ? "datasets" : "models";
  if (source_ == HubSource::kModelScope) {
    const std::string url = text("{}/api/v1/{}/{}/repo/files?Revision={}&Recursive=True", endpoint_, kind,
                                 repo.str(), escaped(revision));
    out.commit = revision;
    out.files = files_of_modelscope(get(url, repo, revision, kLargestListing).body, endpoint_);
    return out;
  }
  const std::string about = text("{}/api/{}/{}", endpoint_, kind, repo.str());
  std::string slashless = escaped(revision);
  for (size_t at = slashless.find('/'); at != slashless.npos; at = slashless.find('/', at))
    slashless.replace(at, 1, "%2F");
  out.commit =
      is_hex(revision, 40)
          ? revision
          : commit_of_answer(get(about + "/revision/" + slashless, repo, revision, kLargestListing).body,
                             endpoint_);
  std::string url = about + "/tree/" + out.commit + "?recursive=true&expand=false";
  for (int page = 0; !url.empty(); ++page) {
    if (page == kMostPages || out.files.size() > kMostFiles) fail("{}: the listing does not end", repo.str());
    const Got got = get(url, repo, revision, kLargestListing);
    for (HubFile& file : files_of_tree(got.body, endpoint_)) out.files.push_back(std::move(file));
    // A mirror may pass on the address of what it mirrors: the rest is asked of who was asked first.
    const size_t path = got.next.find('/', got.next.find("://") + 3);
    url = got.next.empty() || path == got.next.npos ? "" : origin_of(endpoint_) + got.next.substr(path);
  }
  std::ranges::sort(out.files, {}, &HubFile::path);
  return out;
}

std::string HubClient::read(const RepoListing& listing, const std::string& path, size_t most) {
  return get(file_url(listing, path), listing.repo, listing.revision, most).body;
}

}  // namespace kt::inline hub
