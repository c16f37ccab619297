// What the verbs share: how they fail, how they print, and options that several of them have.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "violin/curves/curves.h"
#include "violin/error.h"
#include "violin/text.h"
#include "violin/viz/scene.h"

namespace violin::data {
struct BadImage;
}

namespace violin::cli {

// Exit codes: done, failed, wrong usage.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kWrongUsage = 2;

// A mistake on the command line.
class Usage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs `work` and turns what it throws into one line on stderr, after `who`, and an exit code.
int run(std::string_view who, const std::function<void()>& work);

// What an exception says, in one line: torch's own carry a trace of the calls.
std::string message_of(const std::exception& error);

// The value of an option (its name may be empty); what the library does not accept there is a mistake on the command
// line.
template <typename Parse>
auto argument(std::string_view option, const Parse& parse) {
  try {
    return parse();
  } catch (const Error& error) {
    throw Usage((option.empty() ? "" : std::string(option) + ": ") + error.what());
  }
}

// "0,3,-1"; nothing for an empty text. Throws Usage that names the option.
std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view text);

// Before the work, for a file that will be written (no path: nothing to check): it is none of those that are read, nor
// one of a run's own. Throws Usage.
void check_replaces(std::string_view option, const std::string& path, const std::vector<std::string>& read);
// The same for what is no picture itself: it replaces none, and can be written. Throws violin::Error or Usage.
void check_output(std::string_view option, const std::string& path, const std::vector<std::string>& read);
// Two files that will be written are two, however they are spelled. Throws Usage.
void check_different(std::string_view option, const std::string& path, std::string_view other_option,
                     const std::string& other);

// Whether a path lies in a folder or is it. False for a folder that is not there: that is said where it is read.
bool lies_inside(const std::filesystem::path& path, const std::filesystem::path& folder);

// To stdout; throws violin::Error when it cannot be written. A note goes to stderr as one line.
void print(std::string_view text);
void note(std::string_view text);
void note_skipped(const std::vector<data::BadImage>& images);  // each, and how many

// What is wrong with the value of --seconds or --seed, for CLI11; nothing where it is a time to measure for, a seed.
std::string check_seconds(const std::string& text);
std::string check_seed(const std::string& text);

// A JSON array of numbers, written piece by piece so that a large one needs no memory of its own.
void print_array(std::span<const std::int32_t> values);

struct Terminal {
  bool color = false;  // stdout is a terminal that shows colours, and NO_COLOR is not set
  std::int64_t width = 80;
};
Terminal terminal();

// --grid, --set, --curve
struct GridOptions {
  std::string grid = "14x14";
  std::optional<std::string> set;
  std::vector<std::string> curves;
};

struct NamedCurve {
  std::string name;  // as it was asked for: an alias stays one
  curves::Curve curve;
};

struct Request {
  curves::Grid grid;
  std::vector<NamedCurve> named;
  std::vector<curves::Curve> curves;
};

void add_grid_options(CLI::App& verb, GridOptions& options);

// The set first, then the curves; all eight when neither is given, zigzag, which has no three-dimensional form, in
// every frame by itself. A curve that is named twice is taken once.
Request parse_request(const GridOptions& options);

// --svg, --png, --scale
struct PictureOptions {
  std::optional<std::string> svg;
  std::optional<std::string> png;
  double scale = 2;

  bool wanted() const { return svg || png; }
};

void add_picture_options(CLI::App& verb, PictureOptions& options);
void write_pictures(const viz::Scene& scene, const PictureOptions& options, const std::vector<std::string>& read = {});

// The verbs, one file each.
void add_bench(CLI::App& app);
void add_convert(CLI::App& app);
void add_curves(CLI::App& app);
void add_demo(CLI::App& app);
void add_eval(CLI::App& app);
void add_features(CLI::App& app);
void add_finetune(CLI::App& app);
void add_inspect(CLI::App& app);
void add_mask(CLI::App& app);
void add_models(CLI::App& app);
void add_predict(CLI::App& app);
void add_report(CLI::App& app);
void add_train(CLI::App& app);

}  // namespace violin::cli
