// What a hub is asked, and what its answers mean: listings with sizes and sums, addresses of files, refusals as one
// line. Every name and number of an answer is checked here.
#pragma once
#include <string>
#include <vector>

#include "hub/repository.h"
#include "hub/web.h"

namespace kt::inline hub {

struct RepoListing {
  RepoId repo;
  std::string revision;        // as asked for
  std::string commit;          // that it means now; of ModelScope the revision
  std::vector<HubFile> files;  // by path
};

// Parts of answers, for tests and fuzzing: Error beginning with `where` for anything but what is expected.
std::string commit_of_answer(std::string_view answer, const std::string& where);
std::vector<HubFile> files_of_tree(std::string_view answer, const std::string& where);
std::vector<HubFile> files_of_modelscope(std::string_view answer, const std::string& where);

class HubClient {
 public:
  // The endpoint is $HF_ENDPOINT, or https://huggingface.co; of ModelScope $MODELSCOPE_ENDPOINT, or
  // https://modelscope.cn. The token is $HF_TOKEN's or that of the file which `hf auth login` writes; of ModelScope
  // $MODELSCOPE_API_TOKEN's. Error(kUnsupported) without libcurl; Error if HF_HUB_OFFLINE forbids to ask.
  explicit HubClient(HubSource source);

  RepoListing list(const RepoId& repo, const std::string& revision);
  // A whole small file; Error if it has more bytes than `most`.
  std::string read(const RepoListing& listing, const std::string& path, size_t most);

  std::string file_url(const RepoListing& listing, const std::string& path) const;
  // What goes along with a request to `url`: the token, but to the hub itself alone.
  std::vector<std::string> fields_for(const std::string& url) const;
  // Where a redirect may lead: Error if from https to http, or to nothing that can be fetched.
  void check_redirect(const std::string& from, const std::string& to) const;
  // Throws what an answer that is no success means for the user.
  [[noreturn]] void refuse(const WebHead& head, const RepoId& repo, const std::string& revision,
                           const std::string& what) const;

  Web& web() { return web_; }
  HubSource source() const { return source_; }
  const std::string& endpoint() const { return endpoint_; }
  std::string page_of(const RepoId& repo) const;  // for people

 private:
  struct Got {
    std::string body, next;  // next: the address of the rest, "" at the end
  };
  Got get(const std::string& url, const RepoId& repo, const std::string& revision, size_t most);

  HubSource source_;
  std::string endpoint_, token_;
  Web web_;
};

// Whether trying again may help.
bool is_passing(int status);  // 408, 429 and what a server says of itself
// How long to wait: what the server asks for (at most five minutes), else longer each time.
std::chrono::milliseconds pause_after(int failures, const WebHead& head);

}  // namespace kt::inline hub
