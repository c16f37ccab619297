#include "cli/common.h"

#include <c10/util/Exception.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>

#include "violin/data/dataset.h"
#include "violin/data/file.h"
#include "violin/data/loader.h"
#include "violin/text.h"
#include "violin/train/run_folder.h"

namespace violin::cli {

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr) return error.what();
  const std::string text = torch_error->what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

int run(std::string_view who, const std::function<void()>& work) {
  const std::string name(who);
  try {
    work();
    if (std::fflush(stdout) != 0) throw Error(std::string("cannot write to standard output: ") + std::strerror(errno));
    return kDone;
  } catch (const Usage& error) {
    note(name + ": " + error.what() + " (see '" + name + " --help')");
    return kWrongUsage;
  } catch (const std::bad_alloc&) {
    note(name + ": out of memory");
  } catch (const std::exception& error) {
    note(name + ": " + message_of(error));
  }
  return kFailed;
}

namespace {

bool is_picture(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) && data::is_image_file(path);
}

}  // namespace

void check_replaces(std::string_view option, const std::string& path, const std::vector<std::string>& read) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  const auto refuse = [&](const std::string& what) {
    throw Usage(std::string(option) + " '" + path + "' would replace " + what);
  };
  std::error_code ignored;
  const fs::path file = fs::weakly_canonical(path, ignored);
  for (const std::string& other : read) {
    bool same = fs::equivalent(path, other, ignored);
    if (fs::is_directory(other, ignored)) {
      for (const char* part : {"best", "last"})
        same = same || fs::equivalent(fs::absolute(path).parent_path(), fs::path(other) / part, ignored);
      const fs::path inside = file.lexically_relative(fs::weakly_canonical(other, ignored));
      same = same || (is_picture(file) && !inside.empty() && *inside.begin() != "..");
    }
    if (same) refuse("what is read from '" + other + "'");
  }
  if (train::is_run_file(path)) refuse("a file of a run; give another name");
}

void check_output(std::string_view option, const std::string& path, const std::vector<std::string>& read) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  const fs::path named = fs::path(path).parent_path();
  const fs::path folder = named.empty() ? fs::path(".") : named;
  if (!fs::is_directory(folder, ignored))
    throw Error("cannot write '" + path + "': there is no folder '" + folder.string() + "'");
  check_replaces(option, path, read);
  if (is_picture(path)) throw Usage(std::string(option) + " '" + path + "' would replace a picture");
  if (fs::is_directory(path, ignored)) throw Error("cannot write '" + path + "': it is a folder; give a file");
  if (::access((fs::exists(path, ignored) ? fs::path(path) : folder).c_str(), W_OK) != 0)
    throw Error("cannot write '" + path + "': " + std::strerror(errno));
}

void check_different(std::string_view option, const std::string& path, std::string_view other_option,
                     const std::string& other) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const auto place = [&](const std::string& name) { return fs::weakly_canonical(fs::absolute(name), ignored); };
  if (!path.empty() && !other.empty() && place(path) == place(other))
    throw Usage(std::string(option) + " and " + std::string(other_option) + " name the same file");
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) {
    throw Error(std::string("cannot write to standard output: ") + std::strerror(errno));
  }
}

bool lies_inside(const std::filesystem::path& path, const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::path outer = std::filesystem::canonical(folder, error);
  if (error || !std::filesystem::is_directory(outer, error)) return false;
  // Of a relative path of which nothing exists weakly_canonical makes no absolute one.
  const std::filesystem::path inner = std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
  return !error && std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view text) {
  std::vector<std::int64_t> result;
  for (std::string_view left = text; !text.empty();) {
    const std::string_view item = left.substr(0, left.find(','));
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), number);
    if (error != std::errc() || end != item.data() + item.size())
      throw Usage(std::string(option) + " '" + std::string(text) + "': expected numbers separated by commas");
    result.push_back(number);
    if (item.size() == left.size()) break;
    left.remove_prefix(item.size() + 1);
  }
  return result;
}

void note_skipped(const std::vector<data::BadImage>& images) {
  for (const data::BadImage& image : images) note("skipped a bad image: " + image.message);
  if (!images.empty()) note("skipped " + counted(std::ssize(images), "bad image"));
}

void note(std::string_view text) {
  std::fprintf(stderr, "%s\n", printable(text).c_str());
}

std::string check_seconds(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value > 0 && value <= 86400 ? "" : "'" + text + "': expected a number above 0 and at most 86400";
}

std::string check_seed(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole ? "" : "'" + text + "': expected a whole number from 0 to 18446744073709551615";
}

void print_array(std::span<const std::int32_t> values) {
  print("[");
  std::array<char, 16> buffer;
  for (std::size_t i = 0; i < values.size(); ++i) {
    char* start = buffer.data();
    if (i > 0) *start++ = ',';
    const char* end = std::to_chars(start, buffer.data() + buffer.size(), values[i]).ptr;
    print({buffer.data(), static_cast<std::size_t>(end - buffer.data())});
  }
  print("]");
}

Terminal terminal() {
  Terminal result;
  if (isatty(STDOUT_FILENO) == 0) return result;
  const char* type = std::getenv("TERM");
  const char* no_color = std::getenv("NO_COLOR");
  result.color = type != nullptr && std::strcmp(type, "dumb") != 0 && (no_color == nullptr || *no_color == 0);
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) result.width = size.ws_col;
  return result;
}

void add_grid_options(CLI::App& verb, GridOptions& options) {
  verb.add_option("-g,--grid", options.grid, "Patches: HxW, or TxHxW with frames (default 14x14)")
      ->type_name("GRID")
      ->group("Curves");
  verb.add_option("-c,--curve", options.curves, "A curve; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->group("Curves");
  verb.add_option("-s,--set", options.set, "violin (the eight, default), normal, transposed, or a list: z,hilbert")
      ->type_name("SET")
      ->group("Curves");
}

Request parse_request(const GridOptions& options) {
  Request request;
  request.grid = argument("--grid", [&] { return curves::parse_grid(options.grid); });
  const auto add = [&request](std::string name, const curves::Curve& curve) {
    const auto same = [&](const NamedCurve& other) { return other.curve == curve; };
    if (std::any_of(request.named.begin(), request.named.end(), same)) return;
    request.named.push_back({std::move(name), curve});
    request.curves.push_back(curve);
  };
  if (options.set) {
    for (const curves::Curve& curve : argument("--set", [&] { return curves::parse_curves(*options.set); }))
      add(curve.name(), curve);
  } else if (options.curves.empty()) {
    for (curves::Curve curve : curves::parse_curves("violin")) {
      curve.per_frame = request.grid.is_3d() && curve.kind == curves::Kind::kZigzag;
      add(curve.name(), curve);
    }
  }
  for (const std::string& name : options.curves) {
    add(name, argument("--curve", [&] { return curves::parse_curve(name); }));
  }
  // A curve that does not exist in so many dimensions is a mistake on the command line.
  for (const curves::Curve& curve : request.curves) {
    if (curve.kind != curves::Kind::kManhattan) argument("", [&] { return curves::ranks(curve, request.grid); });
  }
  return request;
}

void add_picture_options(CLI::App& verb, PictureOptions& options) {
  verb.add_option("--svg", options.svg, "Write the picture as SVG")->type_name("FILE")->group("Output");
  verb.add_option("--png", options.png, "Write the picture as PNG")->type_name("FILE")->group("Output");
  verb.add_option("--scale", options.scale, "Pixels of the PNG per unit of the SVG (default 2)")
      ->type_name("X")
      ->group("Output");
}

void write_pictures(const viz::Scene& scene, const PictureOptions& options, const std::vector<std::string>& read) {
  check_replaces("--svg", options.svg.value_or(""), read);
  check_replaces("--png", options.png.value_or(""), read);
  check_different("--svg", options.svg.value_or(""), "--png", options.png.value_or(""));
  if (!(options.scale >= 0.25 && options.scale <= 8)) throw Usage("--scale must be from 0.25 to 8");
  // Everything is made before anything is written.
  const std::string svg = options.svg ? viz::to_svg(scene) : "";
  const Bytes png = options.png ? encode_png(viz::to_image(scene, options.scale)) : Bytes{};
  if (options.svg) {
    write_file_atomically(*options.svg, svg);
    note("wrote " + *options.svg);
  }
  if (options.png) {
    write_file_atomically(*options.png, png);
    note("wrote " + *options.png);
  }
}

}  // namespace violin::cli
