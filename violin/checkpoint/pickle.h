// Pickles as torch.save writes them, protocols 2 to 5, read as plain data.
//
// A pickle is a program for a small stack machine whose instructions include "call this Python function". This reader
// runs the machine and calls nothing: a name that the program asks for ("global") is looked up in a fixed table, which
// says how the result looks as data (pickle_globals.h), and every name outside the table is refused. Work and memory
// are bounded by the size of the pickle.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "violin/checkpoint/byte_reader.h"
#include "violin/checkpoint/value.h"

namespace violin::checkpoint {

// A storage that tensors refer to; its bytes lie elsewhere in the file.
struct PickleStorage {
  std::string key;
  DType dtype = DType::kU8;  // as named first; kU8 for untyped storages
  std::int64_t bytes = 0;    // at least
};

struct Pickle {
  Value root;                           // tensors refer to `storages` by index; their layout is not checked yet
  std::vector<PickleStorage> storages;  // one per key
  std::size_t bytes = 0;                // how many the pickle took
};

// Reads the one pickle that the bytes begin with. `what` names it in messages: "data.pkl".
Pickle read_pickle(ByteSpan bytes, std::string_view what);

}  // namespace violin::checkpoint
