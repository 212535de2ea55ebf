"""The data sets that can be named, each in one line. `fcljax list` starts at once because
nothing is imported here."""

from fcljax.settings import ARRAY_NETS, TEXT_NETS

_SUBSET = (
    "ImageNet classes: those of --class-list, else numpy's RandomState(1993) picks, "
    "as code of iCaRL, PODNet and BiC does"
)

NAMED = {
    "cifar10": "CIFAR-10: 50,000 + 10,000 photos of 10 classes, 32x32",
    "cifar100": "CIFAR-100 with its fine labels: 50,000 + 10,000 photos of 100 classes, 32x32",
    "imagenet_r": "ImageNet-R: 30,000 renditions of 200 ImageNet classes; "
    "in the 24,000 + 6,000 split of PILOT if it is there, else random 80/20",
    "imagenet_r_hepco": "ImageNet-R in the random 80/20 split of HePCo's release, "
    "whatever split its folder has",
    "cub200": "CUB-200-2011: 11,788 photos of 200 birds; "
    "in the 9,430 + 2,358 split of PILOT if it is there, else random 80/20",
    "cars196": "Stanford Cars: 16,185 photos of 196 models of cars, in their official 8,144 + 8,041 split",
    "imagenet_a": "ImageNet-A: 7,500 natural adversarial photos of 200 ImageNet classes; "
    "in a published split if it is there, else random 80/20",
    "domainnet": "DomainNet: 345 classes, its six domains pooled, random 80/20 split",
    "office_home": "Office-Home: 65 classes, its four domains pooled, random 80/20 split",
    "core50": "CORe50: 164,866 frames of 50 objects in 11 sessions, 128x128; "
    "sessions 3, 7 and 10 are for testing",
    "eurosat": "EuroSAT: 27,000 satellite images of 10 kinds of land, 64x64, random 80/20 split",
    "tiny_imagenet": "Tiny-ImageNet: 100,000 + 10,000 photos of 200 classes, 64x64; "
    "its validation split is the test split",
    **{f"imagenet{count}": f"{count} {_SUBSET}" for count in (100, 200)},
    "omniglot": "Omniglot: 1,623 handwritten characters, 20 drawings each, 105x105; "
    "the last 5 of each character are for testing",
    "mnist": "MNIST: 60,000 + 10,000 grey handwritten digits, 28x28",
    "fashion_mnist": "Fashion-MNIST: 60,000 + 10,000 grey pictures of 10 kinds of clothing, 28x28",
}
DATASETS = {
    "digits": "scikit-learn's 1,797 scanned handwritten digits, 10 classes, 32x32; comes with the library",
    "shifted_digits": "the same digits in five domains, which tasks may be: plain, turned, inverted, noisy, "
    "blurred (column domain); comes with the library",
    "glyphs": "rendered letters of rare alphabets, 100 classes, 32x32, as many per class as asked for; "
    "made on the spot",
    "wine": "scikit-learn's table of 178 wines, 13 columns, 3 classes; comes with the library",
    "breast_cancer": "scikit-learn's table of 569 tumours, 30 columns, 2 classes; comes with the library",
    "digits_table": "scikit-learn's 1,797 digits in a table, 64 columns, 10 classes; comes with the library",
    "text": "1,480 docstrings of Python's standard library, 10 classes: the package that each is from; comes "
    "with the library",
    "csv:FILE": "a table of numbers and categories with a column label (or class, target, y); a fifth is "
    "for testing, or csv:TRAIN,TEST",
    "texts:PATH": "texts with labels: a folder of parquet or arrow files, OWNER/NAME in the hub's cache, or "
    "LEAF's JSON (column client); texts:TRAIN,TEST for JSON; with a further part .../tokenizer.json for the "
    "encoder of a checkpoint",
    "npz:PATH": "arrays x_train, y_train, x_test, y_test in a .npz file, or MedMNIST's train_images, "
    "train_labels and so on, and class_names and columns (NAME_train, NAME_test) if there are any; x uint8, "
    "or float in [0, 1]; [N, H, W, 3], [N, 3, H, W] or [N, H, W], "
    "or any numbers with --backbone mlp, conv1d or identity; y integers, text or one-hot",
    "mix:NAME+NAME": "the classes of several of the others beside each other, images in the first one's size",
    "hf:NAME": "a data set of the Hugging Face hub, OWNER/NAME in its cache or a folder of parquet or arrow "
    "files; its other columns are kept",
    "tfds:NAME": "a data set that tensorflow-datasets has prepared as array_record files",
    "folder:PATH": "train/CLASS/* and test/CLASS/* (or val) below PATH, CLASS/* alone (random 80/20), or "
    "train/SITE/CLASS/* (column site); PNG, JPEG, GIF, BMP and WebP",
    "list:FILE": "a text file with a path, a label and perhaps a client and a task in each line; or two, "
    "list:TRAIN,TEST",
    **NAMED,
}
# data sets that are no images, by name or by form
ARRAY_SETS = ("wine", "breast_cancer", "digits_table", "csv", "text", "texts")


def has_arrays(dataset: str, backbone: str) -> bool:
    """Check whether a data set has no images; a .npz file may have arrays of any kind."""
    form = dataset.partition(":")[0]
    return form in ARRAY_SETS or (form == "npz" and backbone in (*ARRAY_NETS, *TEXT_NETS))
