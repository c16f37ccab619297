// Images: from files to batches.
//   image.h       decoding of JPEG, PNG and WebP, encoding of PNG
//   dataset.h     labelled images on disk: folders, CIFAR files, manifests; splits and stratified parts of them
//   resize.h      resampling, the same bits as Pillow's
//   augment.h     operations of RandAugment and colour jitter
//   transforms.h  an image to the numbers a network reads, for training and for evaluation
//   statistics.h  mean and deviation of a set's pixels
//   sampler.h     the order of an epoch, balanced or repeated, dealt out to processes
//   random.h      random numbers that follow from (seed, epoch, index)
// With torch, in the library violin_data_torch:
//   loader.h      batches made by worker threads
//   mixup.h       mixup and CutMix over a batch, with soft targets
#pragma once

#include "violin/data/augment.h"
#include "violin/data/dataset.h"
#include "violin/data/image.h"
#include "violin/data/random.h"
#include "violin/data/resize.h"
#include "violin/data/sampler.h"
#include "violin/data/statistics.h"
#include "violin/data/transforms.h"
