#include <png.h>

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "violin/data/codecs.h"
#include "violin/error.h"

namespace violin::codec {
namespace {

// libpng leaves through longjmp, which runs no destructors: the functions that call setjmp hold plain data only, and
// everything that must be freed belongs to their callers.
struct Session {
  png_structp png = nullptr;
  png_infop info = nullptr;
  std::jmp_buf escape = {};
  char message[128] = {};
  bool writes = false;
  std::span<const std::uint8_t> input;  // what is left to read
  Bytes* output = nullptr;

  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    if (writes) {
      png_destroy_write_struct(&png, &info);
    } else {
      png_destroy_read_struct(&png, &info, nullptr);
    }
  }
};

[[noreturn]] void on_error(png_structp png, png_const_charp message) {
  auto& session = *static_cast<Session*>(png_get_error_ptr(png));
  std::snprintf(session.message, sizeof session.message, "%s", message);
  std::longjmp(session.escape, 1);
}

void on_warning(png_structp, png_const_charp) {}

void on_read(png_structp png, png_bytep data, std::size_t size) {
  auto& session = *static_cast<Session*>(png_get_io_ptr(png));
  if (size > session.input.size()) png_error(png, "the file is truncated");
  std::memcpy(data, session.input.data(), size);
  session.input = session.input.subspan(size);
}

bool append(Bytes& bytes, png_const_bytep data, std::size_t size) {
  try {
    bytes.insert(bytes.end(), data, data + size);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void on_write(png_structp png, png_bytep data, std::size_t size) {
  if (!append(*static_cast<Session*>(png_get_io_ptr(png))->output, data, size)) png_error(png, "out of memory");
}

void on_flush(png_structp) {}

bool read_header(Session& session) {
  if (setjmp(session.escape) != 0) return false;
  session.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &session, on_error, on_warning);
  if (session.png != nullptr) session.info = png_create_info_struct(session.png);
  if (session.info == nullptr) return false;
  png_set_read_fn(session.png, &session, on_read);
  // Texts and profiles are not used, and packed ones swell a thousandfold: nothing beyond the pixels is looked at but
  // the orientation.
  constexpr png_byte kExif[] = "eXIf";
  png_set_keep_unknown_chunks(session.png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_set_keep_unknown_chunks(session.png, PNG_HANDLE_CHUNK_AS_DEFAULT, kExif, 1);
  png_read_info(session.png, session.info);
  return true;
}

// Asks for 8-bit RGB, or RGBA where there is transparency; returns the number of channels, 0 on failure.
int start_pixels(Session& session) {
  if (setjmp(session.escape) != 0) return 0;
  png_set_expand(session.png);
  png_set_scale_16(session.png);
  png_set_gray_to_rgb(session.png);
  png_set_interlace_handling(session.png);
  png_read_update_info(session.png, session.info);
  return png_get_channels(session.png, session.info);
}

// `pixels` is [height, width, channels].
bool read_pixels(Session& session, std::uint8_t* pixels) {
  if (setjmp(session.escape) != 0) return false;
  const std::size_t stride = png_get_rowbytes(session.png, session.info);
  const png_uint_32 height = png_get_image_height(session.png, session.info);
  const int passes = png_get_interlace_type(session.png, session.info) == PNG_INTERLACE_NONE ? 1 : 7;
  for (int pass = 0; pass < passes; ++pass) {
    for (png_uint_32 y = 0; y < height; ++y) png_read_row(session.png, pixels + y * stride, nullptr);
  }
  png_read_end(session.png, session.info);
  return true;
}

int orientation_of(const Session& session) {
#ifdef PNG_eXIf_SUPPORTED
  png_uint_32 size = 0;
  png_bytep exif = nullptr;
  if (png_get_eXIf_1(session.png, session.info, &size, &exif) != 0) return exif_orientation({exif, size});
#else
  (void)session;
#endif
  return 1;
}

bool write_all(Session& session, const Image& image, int filters) {
  if (setjmp(session.escape) != 0) return false;
  session.png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &session, on_error, on_warning);
  if (session.png != nullptr) session.info = png_create_info_struct(session.png);
  if (session.info == nullptr) return false;
  png_set_write_fn(session.png, &session, on_write, on_flush);
  png_set_compression_level(session.png, 9);
  png_set_filter(session.png, PNG_FILTER_TYPE_BASE, filters);
  png_set_IHDR(session.png, session.info, static_cast<png_uint_32>(image.width), static_cast<png_uint_32>(image.height),
               8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_write_info(session.png, session.info);
  for (std::int64_t y = 0; y < image.height; ++y) png_write_row(session.png, image.at(0, y));
  png_write_end(session.png, session.info);
  return true;
}

[[noreturn]] void fail(const Session& session) {
  throw Error(std::string("broken PNG: ") + (session.message[0] != 0 ? session.message : "out of memory"));
}

}  // namespace

bool is_png(std::span<const std::uint8_t> bytes) {
  return bytes.size() >= 8 && png_sig_cmp(bytes.data(), 0, 8) == 0;
}

Image decode_png(std::span<const std::uint8_t> bytes, std::int64_t max_pixels, int& orientation) {
  Session session;
  session.input = bytes;
  if (!read_header(session)) fail(session);
  const std::int64_t width = png_get_image_width(session.png, session.info);
  const std::int64_t height = png_get_image_height(session.png, session.info);
  check_size(width, height, max_pixels);

  const int channels = start_pixels(session);
  if (channels != 3 && channels != 4) fail(session);
  Image image(width, height);
  if (channels == 3) {
    if (!read_pixels(session, image.pixels.data())) fail(session);
  } else {
    std::vector<std::uint8_t> rgba(static_cast<std::size_t>(width * height * 4));
    if (!read_pixels(session, rgba.data())) fail(session);
    lay_on_white(rgba.data(), width * height, image.pixels.data());
  }
  orientation = orientation_of(session);
  return image;
}

}  // namespace violin::codec

namespace violin {

Bytes encode_png(const Image& image) {
  if (image.width < 1 || image.height < 1 ||
      image.pixels.size() != static_cast<std::size_t>(image.width * image.height * 3)) {
    throw Error("cannot encode an image whose pixels do not match its size");
  }
  // Drawings are smaller unfiltered, photographs filtered, and neither can be told from the other beforehand.
  Bytes smallest;
  for (const int filters : {PNG_ALL_FILTERS, PNG_FILTER_NONE}) {
    Bytes bytes;
    codec::Session session;
    session.writes = true;
    session.output = &bytes;
    if (!codec::write_all(session, image, filters)) {
      throw Error(std::string("cannot encode PNG: ") + (session.message[0] != 0 ? session.message : "out of memory"));
    }
    if (smallest.empty() || bytes.size() < smallest.size()) smallest = std::move(bytes);
  }
  return smallest;
}

}  // namespace violin
